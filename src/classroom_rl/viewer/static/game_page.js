// A seat for a person: the user plays one sailor of a game of Marooned, the current model another one, scripts the rest.
// The page keeps the messages; the server plays the game again from them.

import { get, post } from "./api.js";
import { message } from "./conversation_view.js";
import { el, input, longText, show } from "./dom.js";
import { latestSet } from "./sets.js";

const SAILORS = 5;
const ISLANDS = 60;

export async function gamePage(host, given, run) {
  const state = { island: "1", model: "1", seat: "2", game: null, said: [], views: [], moment: null, busy: false, wrong: "" };
  const game = el("section", { class: "chat card game", "aria-label": "Game" });
  const aside = el("aside", { class: "lessons card", "aria-label": "Seats" });
  show(host, el("div", { class: "two chatting" }, game, aside));
  await drawSeats(aside, state, run, given, () => begin(game, state, run));
  drawGame(game, state, run);
  return {};
}

async function drawSeats(aside, state, run, given, start) {
  const where = given.where && given.where !== "now" ? given.where : latestSet(run);
  const known = run.steps.length + run.evaluations.length && where !== "now" ? (await get("lessons", { where, text: "", limit: ISLANDS })).columns.title : [];
  const number = (label, name, properties) => input(label, state[name], (value) => { state[name] = value; }, { type: "number", min: 1, ...properties });
  const draw = () => show(aside, el("h2", {}, "Seats"),
    number("Island", "island", { min: 0, max: 999999999, id: "island" }),
    number("The model is sailor", "model", { max: SAILORS, id: "model-seat" }),
    number("You are sailor", "seat", { max: SAILORS, id: "own-seat" }),
    el("button", { type: "button", class: "primary", id: "start", disabled: !run.chat.on, onclick: start }, "Begin the game"),
    known.length ? [el("h3", {}, "Islands of the run"), el("ul", { class: "pick" }, known.map((title) => el("li", {}, el("button", { type: "button", onclick: () => { choose(state, title); draw(); } }, title))))] : null);
  draw();
}

function choose(state, title) {
  const found = /island (\d+), seat (\d)/.exec(title);
  if (!found) return;
  [state.island, state.model] = [found[1], found[2]];
  if (state.seat === state.model) state.seat = `${Number(state.model) % SAILORS + 1}`;
}

async function begin(host, state, run) {
  Object.assign(state, { game: { problem: `island ${state.island}, seat ${state.model}`, seat: Number(state.seat) }, said: [], views: [], moment: null });
  await play(host, state, run, "");
}

/** Sends an action, then has the model decide as long as it is its turn. */
async function play(host, state, run, action) {
  Object.assign(state, { busy: true, wrong: "" });
  drawGame(host, state, run);
  try {
    let next = action;
    do {
      const due = next ? "person" : "model";
      const moment = await post("game", { ...state.game, said: state.said, action: next });
      for (const [i, text] of moment.said.entries()) add(state, due === "person" && i === 0 ? "student" : "teacher", text, moment.policy);
      Object.assign(state, { moment, said: [...state.said, ...moment.said], wrong: moment.fault });
      next = "";
    } while (state.moment.due === "model");
    if (!state.wrong) add(state, "game", state.moment.shown);
  } catch (error) {
    state.wrong = error.message;
  }
  state.busy = false;
  drawGame(host, state, run);
}

function add(state, role, text, policy = null) {
  state.views.push({ role, parts: [["said", text]], persona: null, tokens: 0, trained: null, ended: true, given: false, policy });
}

function drawGame(host, state, run) {
  const due = state.moment?.due === "person" && !state.busy;
  const box = el("input", { id: "say", autocomplete: "off", placeholder: "An action, such as MOVE NORTH", "aria-label": "Your action", disabled: !due });
  const act = async (action) => { if (action.trim() && due) await play(host, state, run, action.trim()); };
  const shown = { where: "eval-game", turns: state.views, student_name: state.game ? `You, sailor ${state.game.seat}` : "You" };
  show(host,
    run.chat.on ? null : el("p", { class: "off", id: "chat-off" }, run.chat.why),
    el("div", { class: "log", role: "log", "aria-live": "polite" }, opening(state, run),
      el("ol", { class: "dialogue" }, state.views.map((view, i) => message(view, i, shown))),
      state.busy ? el("p", { class: "typing" }, "The others act…") : null,
      state.moment?.due === "nobody" ? el("p", { class: "note", id: "over" }, state.moment.outcome ? `The game is over: ${state.moment.outcome}.` : "Neither of you acts any more.") : null,
      state.wrong ? el("p", { class: "wrong" }, state.wrong) : null),
    due ? el("div", { class: "possible", "aria-label": "Possible actions" }, state.moment.possible.map((action) =>
      el("button", { type: "button", class: "quiet", onclick: () => { if (/^(SPEAK|WHISPER)/.test(action)) { box.value = action; box.focus(); } else act(action); } }, action))) : null,
    el("form", { class: "say", onsubmit: (event) => { event.preventDefault(); act(box.value); } }, box, el("button", { class: "primary", id: "send", disabled: !due }, "Act")));
  const log = host.querySelector(".log");
  log.scrollTop = log.scrollHeight;
  if (host.isConnected && due) box.focus();
}

function opening(state, run) {
  if (state.moment) return el("details", { class: "system" }, el("summary", {}, `You are the ${state.moment.role}. The rules`), el("pre", { dir: "auto" }, longText(state.moment.rules)));
  return run.chat.on ? el("p", { class: "note hint" }, "Take a seat: you see what your sailor sees. The model plays another sailor with the prompt that it has in training, scripted sailors play the others. Nothing of it is trained on.") : null;
}
