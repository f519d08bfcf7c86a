// Elements of a conversation: messages, reward and verdicts, on a page of their own or as a column beside others.

import { el, longText, svg } from "./dom.js";
import { number, plural, topOf, words } from "./format.js";
import { personaBadge, rewardBar } from "./badges.js";
import { messageParts, toolCalls } from "./message_parts.js";
import { foldedReview, hasVersions, turnBadges, versions } from "./reviews.js";

/** The messages, with folded thoughts. */
export function dialogue(conversation) {
  return el("ol", { class: "dialogue" }, conversation.turns.map((turn, i) => message(turn, i, conversation)));
}

export function message(turn, i, conversation) {
  const inGame = conversation.turns?.some((each) => each.role === "game");
  const names = { teacher: inGame ? "Sailor" : "Tutor", student: conversation.student_name ?? "Student", game: "Island" };
  const name = names[turn.role] ?? `${turn.role[0].toUpperCase()}${turn.role.slice(1)}`;
  const beside = hasVersions(turn);
  return el("li", { class: `message ${turn.role}${beside ? " beside" : ""}` },
    el("div", { class: "who" }, el("strong", { dir: "auto" }, name), el("span", { class: "nr" }, `${i + 1}`),
      turn.persona ? personaBadge(turn.persona) : null,
      turn.given ? el("span", { class: "badge plain", title: "It stands in the prompt template" }, "given") : null,
      turn.ended ? null : el("span", { class: "badge bad", title: "It reached its token limit" }, "cut off"),
      turnBadges(turn)),
    beside ? versions(turn) : el("div", { class: "bubble" }, messageParts(turn.parts), toolCalls(turn.tool_calls)),
    tokens(turn, conversation), beside ? null : foldedReview(turn.review));
}

function tokens(turn, conversation) {
  if (turn.role !== "teacher" || turn.given || !turn.tokens) return null;
  const trained = conversation.where.startsWith("eval-") ? "" : conversation.reward === null && conversation.state === "END" ? ", left out of training"
    : turn.trained === null ? "" : `, ${turn.trained === turn.tokens ? "all" : turn.trained} trained on`;
  const score = turn.score === null || turn.score === undefined ? "" : `, pedagogical reward ${number(turn.score, 2)}`;
  return el("p", { class: "tokens" }, `${plural(turn.tokens, "token")}${trained}${score}`);
}

/** The reward and its parts. */
export function rewardCard(conversation) {
  const parts = Object.entries(conversation.rewards);
  return el("section", { class: "card reward-card" }, el("h3", {}, "Reward"),
    el("p", { class: "figure" }, conversation.reward === null ? (conversation.state === "END" ? "none" : "not yet") : number(conversation.reward, 4),
      conversation.rejected ? el("span", { class: "badge bad" }, "rejected") : null),
    conversation.failure ? el("p", { class: "wrong" }, "It could not go on: ", longText(conversation.failure)) : null,
    conversation.overflow && !conversation.failure ? el("p", { class: "note" }, "The dialogue ended early: ", longText(conversation.overflow)) : null,
    conversation.reward === null && conversation.state === "END" && !conversation.failure ? el("p", { class: "note" }, "No verdict came. It counts neither for nor against the tutor.") : null,
    parts.length > 1 ? el("dl", {}, parts.map(([name, value]) => [el("dt", {}, words(name)), el("dd", {}, number(value, 4))])) : null,
    scores(conversation));
}

function scores(conversation) {
  const scored = conversation.verdicts.filter((verdict) => verdict.scores && !verdict.anchor).map(valuesOf);
  if (!scored.length) return null;
  const mean = (name) => scored.reduce((sum, values) => sum + values[name], 0) / scored.length;
  return el("dl", { class: "scores" }, Object.keys(scored[0]).map((name) => {
    const most = topOf(name);
    return [el("dt", {}, words(name)), el("dd", {}, meter(mean(name) / most), `${number(mean(name), 2)}${most === 1 ? "" : ` of ${most}`}`)];
  }));
}

/** A verdict's scores by criterion: those of a rubric stand in `values`, beside their sum. */
function valuesOf(verdict) {
  return verdict.scores?.values ?? verdict.scores ?? {};
}

function meter(share) {
  return svg("svg", { class: "meter", viewBox: "0 0 60 6", "aria-hidden": "true" }, svg("rect", { class: "rail", width: 60, height: 6, rx: 3 }),
    svg("rect", { class: "high", width: Math.max(2, 60 * Math.min(1, Math.max(0, share))), height: 6, rx: 3 }));
}

/** The verdict of each judge attempt. */
export function verdictCards(conversation, open = true) {
  return conversation.verdicts.map((verdict) => el("details", { class: "card verdict", open },
    el("summary", {}, el("span", { class: "rule" }, words(verdict.rule)),
      verdict.anchor ? el("span", { class: "badge unsure", title: "Judged by itself, to compare with the verdict on the whole group; it changes no reward" }, "anchor")
        : conversation.verdicts.length > 1 ? el("span", { class: "nr" }, `attempt ${verdict.attempt + 1}`) : null,
      verdict.rank === null ? null : [" ", el("span", { class: "nr" }, `place ${verdict.rank} of ${verdict.group_size}`)],
      verdict.error ? el("span", { class: "badge bad" }, "failed") : null,
      verdict.beyond_rules ? el("span", { class: "badge unsure", title: "The judge knows no such move, so it gives at most 0.6" }, "beyond what rules can read") : null,
      verdict.accepted === null ? null : el("span", { class: `badge ${verdict.accepted ? "correct" : "bad"}` }, verdict.accepted ? "OK" : "REJECT")),
    verdict.error ? el("p", { class: "wrong" }, longText(verdict.error)) : null,
    Object.entries(verdict.reasons ?? {}).filter(([, reason]) => reason).map(([name, reason]) =>
      el("div", { class: "reason" }, el("h4", {}, words(name), valuesOf(verdict)[name] === undefined ? null : el("span", { class: "nr" }, number(valuesOf(verdict)[name], 2))), el("p", {}, longText(reason)))),
    verdict.raw ? el("details", { class: "raw" }, el("summary", {}, "The judge's whole answer"), el("pre", {}, longText(verdict.raw))) : null));
}

/** A conversation as a column beside others. */
export function column(conversation, heading, href, extra = null) {
  return el("article", { class: "column card" },
    el("header", {}, el("h3", {}, href ? el("a", { href }, heading) : heading), rewardBar(conversation.reward, conversation.state === "END"), extra),
    dialogue(conversation), el("div", { class: "why" }, verdictCards(conversation, false)));
}
