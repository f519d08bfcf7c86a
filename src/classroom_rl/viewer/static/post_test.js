// What the student still knows after a conversation: the ledger with its evidence, and the answers to the post-test.

import { el, longText } from "./dom.js";
import { plural } from "./format.js";

const OUTCOMES = {
  produced: ["correct", "said by itself", "The student produced it before the tutor had said it"],
  given: ["bad", "given away", "The tutor said it first: what the student repeats is no evidence"],
  missed: ["unsure", "not said", "Neither of the two said it"],
};
const STUDENTS = { ledger: "the student as the ledger holds it", student: "the student's model" };

/** The card of a post-test. */
export function postTest(test) {
  const asked = [...new Set(test.answers.map((answer) => answer.student))];
  return el("section", { class: "card post-test" }, el("h3", {}, "What the student still knows"),
    el("p", { class: "note" }, asked.map((student) => sum(test.answers.filter((answer) => answer.student === student), STUDENTS[student] ?? student)).join("; "),
      ". Asked without the conversation."),
    el("ol", { class: "ledger" }, test.ledger.map((entry, place) => item(entry, test.answers.filter((answer) => answer.item === place)))));
}

function sum(answers, who) {
  return `${who}: ${answers.filter((answer) => answer.right).length} of ${plural(answers.length, "question")} right`;
}

function item(entry, answers) {
  const [kind, word, why] = OUTCOMES[entry.outcome];
  return el("li", {}, el("p", { class: "entry" }, el("span", { dir: "auto" }, entry.item), " ",
    el("span", { class: `badge ${kind}`, title: why }, word),
    entry.turn === null ? null : el("span", { class: "nr" }, ` message ${entry.turn + 1}`),
    entry.knew === null ? null : el("span", { class: "badge plain", title: "As far as the program can tell" }, entry.knew ? "known before" : "not known before")),
  el("details", {}, el("summary", {}, plural(answers.length, "answer")), answers.map(answered)));
}

function answered(answer) {
  return el("dl", {}, el("dt", { dir: "auto" }, longText(answer.question)),
    el("dd", { dir: "auto" }, `${STUDENTS[answer.student] ?? answer.student}: `, longText(answer.text), " ",
      el("span", { class: `badge ${answer.right ? "correct" : "bad"}` }, answer.right ? "right" : "wrong")));
}
