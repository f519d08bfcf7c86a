// The chat page: the user is the student of the current tutor, in a lesson that the user chooses.

import { get, post } from "./api.js";
import { message } from "./conversation_view.js";
import { el, input, longText, show } from "./dom.js";
import { plural, setName } from "./format.js";
import { latestSet, setSelect } from "./sets.js";

const LESSONS = 60;

export async function chatPage(host, given, run) {
  const where = given.where && given.where !== "now" ? given.where : run.evaluations.length ? `eval-${run.evaluations[0]}` : latestSet(run);
  const state = { where, problem: "", name: "Alex", turns: [], views: [], busy: false };
  const talk = el("section", { class: "chat card", "aria-label": "Chat" });
  const text = el("textarea", { id: "lesson", rows: "8", dir: "auto", placeholder: "Choose a lesson, or write one.", oninput: () => { state.problem = text.value; } });
  const choose = async (problem_id) => {
    text.value = state.problem = (await get("problem", { where: state.where, problem_id })).problem;
  };
  const aside = el("aside", { class: "lessons card", "aria-label": "Lesson" });
  show(host, el("div", { class: "two chatting" }, talk, aside));
  await drawLessons(aside, state, run, text, choose, () => begin(talk, state, run));
  if (given.problem_id) await choose(given.problem_id);
  drawTalk(talk, state, run);
  return { shown: () => { if (given.problem_id && run.chat.on) begin(talk, state, run); } };
}

async function drawLessons(aside, state, run, text, choose, start) {
  const list = el("ul", { class: "pick" });
  const search = async (wanted) => {
    const lessons = state.where === "now" ? { total: 0, columns: { problem_id: [] } } : await get("lessons", { where: state.where, text: wanted, limit: LESSONS });
    const { problem_id: ids, title } = lessons.columns;
    show(list, ids.map((id, i) => el("li", {}, el("button", { type: "button", dir: "auto", onclick: () => choose(id) }, title[i]))),
      lessons.total > ids.length ? el("li", { class: "note" }, `${plural(lessons.total - ids.length, "more lesson")}: search for one`) : null);
  };
  await search("");
  show(aside, el("h2", {}, "Lesson"),
    run.steps.length + run.evaluations.length ? [setSelect("Lessons of", run, state.where, async (chosen) => { state.where = chosen; await search(""); }, [], { id: "lessons-of" }),
      input("Search", "", search, { type: "search", id: "lesson-search" }), list] : el("p", { class: "note" }, "No conversation has been played yet: write a lesson."),
    el("label", { class: "field" }, el("span", {}, "What it is about"), text),
    input("Your name", state.name, (name) => { state.name = name; }, { id: "student-name", autocomplete: "off", dir: "auto" }),
    el("button", { type: "button", class: "primary", id: "start", disabled: !run.chat.on, onclick: start }, "Start the lesson"));
}

async function begin(talk, state, run) {
  if (!state.problem.trim()) {
    state.wrong = "Choose a lesson first, or write what it is about.";
    return drawTalk(talk, state, run);
  }
  const lesson = { problem: state.problem, student_name: state.name.trim() || null }; // kept when another lesson is selected
  Object.assign(state, { lesson, turns: [], views: [], wrong: "", over: false, policy: null, opening: null });
  try {
    state.opening = await post("chat/opening", body(state));
    for (const said of state.opening.turns) add(state, said.role, said.text, { given: true });
  } catch (error) {
    state.wrong = error.message;
  }
  drawTalk(talk, state, run);
  if (state.opening?.next === "teacher") await answer(talk, state, run);
}

const body = (state) => ({ ...state.lesson, turns: state.turns });

function add(state, role, text, more = {}) {
  state.turns.push({ role, text });
  state.views.push({ role, parts: [["said", text]], persona: null, tokens: 0, trained: null, ended: true, given: false, policy: null, ...more });
}

async function answer(talk, state, run) {
  state.busy = true;
  state.wrong = "";
  drawTalk(talk, state, run);
  try {
    const reply = await post("chat", body(state));
    add(state, "teacher", reply.text, { parts: reply.parts, ended: reply.ended, tokens: reply.tokens, policy: reply.policy });
    state.over = reply.over;
  } catch (error) {
    state.wrong = error.message;
  }
  state.busy = false;
  drawTalk(talk, state, run);
}

function drawTalk(talk, state, run) {
  const box = el("textarea", { id: "say", rows: "2", dir: "auto", placeholder: "Answer as the student…", "aria-label": "Your message", disabled: !run.chat.on || state.busy || !state.opening });
  const send = async () => {
    const said = box.value.trim();
    if (!said || state.busy) return;
    add(state, "student", said);
    await answer(talk, state, run);
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  const last = state.views.at(-1);
  show(talk,
    run.chat.on ? null : el("p", { class: "off", id: "chat-off" }, run.chat.why),
    el("div", { class: "log", role: "log", "aria-live": "polite" }, opening(state, run),
      el("ol", { class: "dialogue" }, state.views.map((view, i) => [policyLine(state.views, i), message(view, i, { where: "eval-chat", student_name: state.name || "You" })])),
      state.busy ? el("p", { class: "typing" }, "The tutor is thinking…") : null,
      state.over ? el("p", { class: "note" }, "The tutor has ended the lesson.") : null,
      state.wrong ? el("p", { class: "wrong" }, state.wrong, " ", last?.role === "student" ? el("button", { type: "button", class: "quiet", onclick: () => answer(talk, state, run) }, "Try again") : null) : null),
    el("form", { class: "say", onsubmit: (event) => { event.preventDefault(); send(); } }, box, el("button", { class: "primary", id: "send", disabled: box.disabled }, "Send")));
  const log = talk.querySelector(".log");
  log.scrollTop = log.scrollHeight;
  if (talk.isConnected && !box.disabled) box.focus();
}

function opening(state, run) {
  if (state.opening) return el("details", { class: "system" }, el("summary", {}, "What the tutor was told"), el("pre", { dir: "auto" }, longText(state.opening.system)));
  return run.chat.on ? el("p", { class: "note hint" }, "You are the student. Choose a lesson and start: the tutor gets the prompt that it gets in training. Nothing that is said here is trained on.") : null;
}

/** Notes which weights answer, at the first answer and when they change. */
function policyLine(views, i) {
  const policy = views[i].policy;
  const before = views.slice(0, i).findLast((view) => view.policy)?.policy;
  return policy && policy !== before ? el("li", { class: "policy-line" }, before ? `New weights: ${policy}` : policy) : null;
}
