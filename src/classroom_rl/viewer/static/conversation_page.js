// The page of one conversation: messages, reward, reasons, and the tokens that were trained on.

import { get, link } from "./api.js";
import { dialogue, rewardCard, verdictCards } from "./conversation_view.js";
import { el, longText, show } from "./dom.js";
import { number, plural, setName, stepShown } from "./format.js";
import { lastList } from "./list_page.js";
import { postTest } from "./post_test.js";

export async function conversationPage(host, { where, id }, run) {
  const body = el("div", { class: "talk" });
  const side = el("aside", { "aria-label": "Reward and reasons" });
  const top = el("header", { class: "heading" });
  show(host, top, el("div", { class: "two" }, el("section", { "aria-label": "Conversation" }, body), side));
  const draw = async () => {
    const conversation = await get("conversation", { where, id });
    show(top, heading(conversation, run));
    show(body, toggles(conversation, body), initially(conversation), dialogue(conversation), afterwards(conversation));
    show(side, rewardCard(conversation), verdictCards(conversation), lesson(conversation), details(conversation));
  };
  await draw();
  return { update: ({ changed }) => (where === "now" && changed("journal") && !body.querySelector("[aria-pressed=true]") ? draw() : null) };
}

function heading(conversation, run) {
  const { where, id, problem_id } = conversation;
  const list = lastList.parameters?.where === where ? lastList.parameters : { where };
  const at = lastList.ids.indexOf(id);
  const step = (to, label) => lastList.ids[to] && at >= 0
    ? el("a", { class: "button", href: link("conversation", { where, id: lastList.ids[to] }) }, label) : null;
  const played = ["eval-before", "eval-after"].every((name) => run.evaluations.includes(name.slice(5))) && where.startsWith("eval-");
  return [
    el("nav", { class: "crumbs", "aria-label": "Where this is" }, el("a", { href: link("conversations", list) }, setName(where)), " / ", `conversation ${conversation.index + 1}`,
      conversation.sampling ? `, ${conversation.sampling}` : ""),
    el("h1", { dir: "auto" }, title(conversation.problem)),
    el("nav", { class: "actions", "aria-label": "From here" }, step(at - 1, "Previous"), step(at + 1, "Next"),
      problem_id ? el("a", { class: "button", href: link("group", { where, problem_id, sampling: conversation.sampling }) }, "Its group, side by side") : null,
      problem_id && conversation.sampling ? el("a", { class: "button", href: link("group", { where, problem_id }) }, "Everybody on this lesson") : null,
      played ? el("a", { class: "button", href: link("compare", { problem_id, sampling: conversation.sampling }) }, "Before and after") : null,
      problem_id ? el("a", { class: "button", href: link("chat", { where, problem_id }) }, "Take this lesson yourself") : null),
  ];
}

/** The first lines of a problem. */
export function title(problem) {
  const line = problem.slice(0, 500).split("\n").map((part) => part.trim()).filter(Boolean).join(" · ");
  return line.length > 110 ? `${line.slice(0, 109)}…` : line || "A conversation that is being played";
}

function toggles(conversation, body) {
  const thoughts = conversation.turns.some((turn) => turn.parts.some(([kind]) => kind === "thought"));
  const view = el("div", { class: "token-view card", hidden: true });
  const tokens = press("Tokens trained on", async (on) => {
    view.hidden = !on;
    body.querySelector(".dialogue").hidden = on;
    if (on && !view.hasChildNodes()) show(view, await tokenView(conversation));
  });
  return el("div", { class: "toggles" }, el("div", { class: "bar" },
    thoughts ? press("Show thoughts", (on) => { for (const each of body.querySelectorAll(".thought")) each.open = on; }) : null, tokens), view);
}

function press(label, change) {
  const button = el("button", { type: "button", "aria-pressed": "false", class: "toggle", onclick: async () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    await change(on);
  } }, label);
  return button;
}

async function tokenView(conversation) {
  const tokens = await get("tokens", { where: conversation.where, id: conversation.id });
  if (tokens.why) return el("p", { class: "note" }, tokens.why);
  return [
    el("p", { class: "legend" }, el("mark", {}, "sampled by the tutor: mask 1"), " ", el("span", { class: "given" }, "given: mask 0"), el("br"),
      `${tokens.trained} of the ${plural(conversation.context_tokens, "token")} after the prompt`,
      conversation.where.startsWith("eval-") ? " were sampled; an evaluation trains on none" : " are trained on", ". Point at one for its probability."),
    el("details", {}, el("summary", {}, "Prompt"), el("pre", { dir: "auto" }, longText(tokens.prompt))),
    el("p", { class: "pieces", dir: "auto" }, tokens.pieces.map(([text, mask, logprob]) => mask
      ? el("mark", { title: `probability ${number(Math.exp(logprob), 3)}` }, visible(text)) : el("span", {}, visible(text)))),
  ];
}

function visible(text) {
  return text.replaceAll("\n", "⏎\n");
}

function initially({ initial_solutions: found, answer }) {
  return found.length ? solutions("What the student makes of it alone, before the lesson", found, answer) : null;
}

function afterwards({ post_test: test, solutions: found, answer }) {
  return [test ? postTest(test) : null, found.length ? solutions("The student's solutions afterwards", found, answer) : null];
}

function solutions(heading, found, answer) {
  return el("section", { class: "card solutions" }, el("h3", {}, heading),
    el("p", { class: "note" }, "Reference: ", el("span", { dir: "auto" }, answer || "none")),
    found.map((solution, i) => el("details", {}, el("summary", {}, `Solution ${i + 1} `,
      el("span", { class: `badge ${solution.grade ? "correct" : "bad"}` }, solution.grade === null ? "not graded" : number(solution.grade, 2))), el("p", {}, longText(solution.text)))));
}

function lesson(conversation) {
  return el("details", { class: "card lesson-text", open: true }, el("summary", {}, "Lesson"), el("p", { class: "text" }, longText(conversation.problem || "It will be here once the conversation has ended.")));
}

function details(conversation) {
  const policies = [...new Set(conversation.turns.map((turn) => turn.policy).filter(Boolean))];
  const lines = [["step", conversation.step === null ? null : stepShown(conversation.step)], ["student", conversation.student_name], ["type", conversation.type], ["policy", policies.join(", ")],
    ["state", conversation.state], ["trained tokens", conversation.where.startsWith("eval-") ? null : conversation.trained_tokens], ["id", conversation.id],
    ["notes", Object.keys(conversation.meta).length ? JSON.stringify(conversation.meta) : null]];
  return el("details", { class: "card" }, el("summary", {}, "Record"),
    el("dl", {}, lines.filter(([, value]) => value !== null && value !== "").map(([label, value]) => [el("dt", {}, label), el("dd", { dir: "auto" }, String(value))])));
}
