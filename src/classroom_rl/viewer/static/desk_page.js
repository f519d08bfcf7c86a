// The teacher's desk: a person decides about the supervisor's corrections, and sees how often it was right.

import { get, link, post } from "./api.js";
import { title } from "./conversation_page.js";
import { message } from "./conversation_view.js";
import { el, longText, select, show, svg } from "./dom.js";
import { percent, plural, setName, stepShown, words } from "./format.js";
import { messageParts } from "./message_parts.js";
import { reviewBox, version } from "./reviews.js";

const PER_PAGE = 10;
const LONGEST_TEXT = 20000;
const SHOWN_BEFORE = 2;
const DECISIONS = [["open", "to be decided"], ["all", "all"], ["accept", "accepted"], ["edit", "edited"], ["reject", "rejected"], ["fine", "rejected: the message was fine"]];
const DECIDED = { accept: ["correct", "accepted"], edit: ["correct", "edited"], reject: ["bad", "rejected"] };

export async function deskPage(host, given) {
  const parameters = { decision: "open", ...given };
  const top = el("header", { class: "heading" }), figures = el("section", { class: "card precision", "aria-label": "Precision of the supervisor" });
  const filters = el("form", { class: "filters card", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() });
  const news = el("p", { class: "note", role: "status" }), list = el("section", { "aria-label": "Corrections" });
  show(host, top, figures, filters, news, list);
  const draw = async () => {
    const desk = await get("corrections", { ...parameters, decision: parameters.decision === "all" ? "" : parameters.decision, limit: PER_PAGE });
    const go = (change) => {
      const to = link("desk", { ...parameters, offset: null, ...change });
      if (to === location.hash) draw().then(() => window.scrollTo(0, 0));
      else location.hash = to;
    };
    const known = (decided) => { show(top, heading(desk.total, decided.undecided)); show(figures, ...precision(desk.categories, decided)); };
    known(desk);
    show(filters, drawFilters(desk, parameters, go));
    filters.hidden = figures.hidden = !desk.total && !desk.overall.decided;
    const cards = desk.corrections.map((each) => card(each, known));
    show(list, cards.map((each) => each.node), desk.corrections.length ? null : nothing(desk), pager(desk, parameters, cards, go));
    show(news);
  };
  await draw();
  return { update: ({ changed }) => {
    if (changed("shelf")) show(news, "A new step was written. ", el("button", { type: "button", class: "quiet", onclick: draw }, "Show its corrections"));
  } };
}

function heading(total, undecided) {
  return [el("h1", {}, "Teacher's desk"),
    el("p", { class: "note" }, "The supervisor's corrections of this run. Your decisions are kept in ", el("code", {}, "correction_decisions.jsonl"), " in the run folder. ",
      el("span", { id: "undecided" }, total ? `${undecided.toLocaleString("en")} of ${plural(total, "correction")} to be decided.` : ""))];
}

// How often the supervisor was right

function precision(counts, { precision: found, overall }) {
  const by = Object.fromEntries(found.map((each) => [each.category, each]));
  const names = [...new Set([...Object.keys(counts), ...Object.keys(by)])].sort();
  const columns = ["Category", "Corrections", "Precision", "Decided", "Accepted", "Edited", "Rejected", "Message was fine"];
  return [el("h2", {}, "How often the supervisor is right"),
    el("p", { class: "note" }, "Precision: accepted and edited corrections, as a share of those that were decided, with a 95 % interval from six decisions on."),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Precision by category" }, el("table", { class: "figures" },
      el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, names.map((name) => figuresRow(words(name) || "(none)", counts[name] ?? 0, by[name] ?? null))),
      el("tfoot", {}, figuresRow("all", Object.values(counts).reduce((sum, count) => sum + count, 0), overall.decided ? overall : null))))];
}

function figuresRow(name, count, figures) {
  const cells = figures === null ? [el("td", { class: "note", colspan: "6" }, "no decision yet")]
    : [el("td", {}, interval(figures), el("strong", {}, percent(figures.precision)), figures.low === null ? "" : el("span", { class: "nr" }, ` ${percent(figures.low)} to ${percent(figures.high)}`)),
      ...["decided", "accepted", "edited", "rejected", "fine"].map((key) => el("td", { class: "right" }, String(figures[key])))];
  return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "right" }, String(count)), cells);
}

function interval({ precision: at, low, high }) {
  return svg("svg", { class: "share", viewBox: "0 0 100 12", "aria-hidden": "true" }, svg("rect", { class: "rail", y: 4, width: 100, height: 4, rx: 2 }),
    low === null ? "" : svg("rect", { class: "reach", x: 100 * low, y: 4, width: Math.max(1, 100 * (high - low)), height: 4, rx: 2 }), svg("circle", { class: "at", cx: 4 + 92 * at, cy: 6, r: 4 }));
}

// The list

function drawFilters(desk, parameters, go) {
  const categories = Object.entries(desk.categories).map(([name, count]) => [name, `${words(name) || "(none)"} (${count})`]);
  return [
    select("Corrections", DECISIONS, parameters.decision, (decision) => go({ decision }), { id: "decision" }),
    select("Category", [["", "any"], ...categories], parameters.category ?? "", (category) => go({ category }), { id: "category" }),
  ];
}

function nothing(desk) {
  if (!desk.total) return el("p", { class: "empty card" }, "This run has no corrections. A supervisor makes them while a training plays its conversations.");
  return el("p", { class: "empty card" }, desk.undecided ? "No correction passes these filters. " : "Every correction has been decided. ", el("a", { href: link("desk", { decision: "all" }) }, "Show all"));
}

function pager(desk, parameters, cards, go) {
  if (desk.matching <= PER_PAGE && !desk.offset) return null;
  const next = () => { // those that were decided here are no longer among those to be decided
    const gone = parameters.decision === "open" ? cards.filter((each) => each.isDecided()).length : 0;
    go({ offset: desk.offset + cards.length - gone || null });
  };
  return el("nav", { class: "pager", "aria-label": "Pages of the list" },
    el("button", { type: "button", disabled: !desk.offset, onclick: () => go({ offset: Math.max(0, desk.offset - PER_PAGE) || null }) }, "Back"),
    el("span", {}, !cards.length ? "" : `${desk.offset + 1}–${desk.offset + cards.length} of ${desk.matching.toLocaleString("en")}`),
    el("button", { type: "button", disabled: desk.offset + cards.length >= desk.matching, onclick: next }, "Next"));
}

// One correction

function card(correction, known) {
  const state = { decision: correction.decision, editing: false, typed: null, busy: false, wrong: "" };
  const node = el("article", { class: "card correction-card", tabindex: "-1" });
  const target = el("div", { class: "targets" }), bar = el("div", { class: "decide" });
  const redraw = () => {
    show(target, targets(correction, state));
    show(bar, state.editing ? editBar(state, send, redraw, target) : buttons(state, send, redraw));
    if (state.editing) target.querySelector("textarea").focus();
  };
  const send = async (decision, more = {}) => {
    if (state.busy) return;
    state.busy = true;
    try {
      const { conversation, turn, draft, review } = correction;
      const about = { conversation, turn, draft, correction: review.correction };
      const decided = await post("corrections/decision", { ...about, decision, ...more });
      Object.assign(state, { decision: decided.decision, editing: false, wrong: "", typed: null });
      known(decided);
    } catch (error) {
      state.wrong = error.message;
      if (state.editing) state.typed = target.querySelector("textarea").value;
    }
    state.busy = false;
    redraw();
    if (!state.editing) node.focus({ preventScroll: true });
  };
  show(node, cardHead(correction), lesson(correction), before(correction), target, bar);
  redraw();
  return { node, isDecided: () => state.decision !== null };
}

function cardHead({ where, conversation, index, turn, draft, step }) {
  return el("header", {}, el("h3", {}, el("a", { href: link("conversation", { where, id: conversation }) },
    `${step === null ? "Conversation" : `Step ${stepShown(step)}, conversation`} ${index + 1}, message ${turn + 1}`), draft > 0 ? `, draft ${draft + 1}` : ""),
    where === "now" ? el("span", { class: "badge busy" }, setName(where)) : null);
}

function lesson({ problem }) {
  return el("details", { class: "lesson-text" }, el("summary", { dir: "auto" }, title(problem)), el("p", { class: "text" }, longText(problem)));
}

function before({ before: turns, student_name }) {
  if (!turns.length) return el("p", { class: "note" }, "It opens the conversation.");
  const shown = (some, first) => el("ol", { class: "dialogue" }, some.map((turn, i) => message({ ...turn, tokens: 0 }, first + i, { where: "eval-desk", student_name })));
  const hidden = Math.max(0, turns.length - SHOWN_BEFORE);
  return el("div", { class: "before" },
    hidden ? el("details", {}, el("summary", {}, plural(hidden, "earlier message")), shown(turns.slice(0, hidden), 0)) : null, shown(turns.slice(hidden), hidden));
}

function targets({ message: parts, review, heard, replaced, draft }, state) {
  const edited = state.decision?.decision === "edit" ? state.decision.text : null;
  const text = state.typed ?? edited ?? review.correction;
  const typing = () => el("label", {}, el("textarea", { class: "edit", rows: String(Math.min(16, 3 + Math.ceil(text.length / 60))), maxlength: String(LONGEST_TEXT), dir: "auto", value: text, "aria-label": "The message that would have been right" }));
  return el("div", { class: "versions" },
    version(draft < 0 ? "What the tutor wrote, and the student heard" : "What the tutor wrote: a draft", "draft", messageParts(parts), reviewBox(review)),
    state.editing ? version("Your correction", "correction", typing())
      : edited !== null ? version("Your correction", "correction", el("p", { class: "said" }, longText(edited))) : null,
    state.editing ? null : version(replaced ? "Correction, which the student heard" : "Correction", edited !== null || state.decision?.decision === "reject" ? "refused" : "correction", el("p", { class: "said" }, edited !== null || state.decision?.decision === "reject" ? el("s", {}, longText(review.correction)) : longText(review.correction))),
    heard !== null && !replaced && !state.editing ? version("What the student heard in the end", "heard", messageParts(heard)) : null);
}

function buttons(state, send, redraw) {
  const is = (name, fine = false) => state.decision?.decision === name && state.decision.message_was_fine === fine;
  const press = (id, label, on, onclick, kind = "toggle") => el("button", { type: "button", class: `${kind} ${id}`, "aria-pressed": String(on), onclick }, label);
  return [
    press("accept", "Accept", is("accept"), () => send("accept")),
    press("edit-it", "Edit", is("edit"), () => { state.editing = true; redraw(); }),
    press("reject", "Reject the correction", is("reject"), () => send("reject")),
    press("fine", "The message was fine", is("reject", true), () => send("reject", { message_was_fine: true })),
    state.decision ? stateBadge(state.decision) : null,
    state.wrong ? el("p", { class: "wrong", role: "alert" }, state.wrong) : null,
  ];
}

function stateBadge({ decision, message_was_fine, time }) {
  const [kind, label] = DECIDED[decision];
  return el("span", { class: `badge ${kind} decided`, title: new Date(1000 * time).toLocaleString() }, message_was_fine ? "rejected: the message was fine" : label);
}

function editBar(state, send, redraw, target) {
  const save = () => {
    state.typed = target.querySelector("textarea").value;
    if (state.typed.trim()) return send("edit", { text: state.typed });
    state.wrong = "Write the message that would have been right.";
    return redraw();
  };
  return [
    el("button", { type: "button", class: "primary save", onclick: save }, "Save"),
    el("button", { type: "button", onclick: () => { Object.assign(state, { editing: false, wrong: "", typed: null }); redraw(); } }, "Cancel"),
    state.wrong ? el("p", { class: "wrong", role: "alert" }, state.wrong) : null,
  ];
}
