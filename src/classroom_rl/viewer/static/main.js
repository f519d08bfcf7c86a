// Chooses the page to show, and keeps it up to date.

import { get, link } from "./api.js";
import { el, show } from "./dom.js";
import { knowCriteria, plural } from "./format.js";
import { runPage } from "./run_page.js";
import { listPage } from "./list_page.js";
import { conversationPage } from "./conversation_page.js";
import { groupPage } from "./group_page.js";
import { comparePage } from "./compare_page.js";
import { chatPage } from "./chat_page.js";
import { gamePage } from "./game_page.js";
import { deskPage } from "./desk_page.js";

const PAGES = { run: runPage, conversations: listPage, conversation: conversationPage, group: groupPage,
  compare: comparePage, chat: (host, ...given) => (given[1].game ? gamePage : chatPage)(host, ...given), desk: deskPage };
const TABS = [["run", "Run"], ["conversations", "Conversations"], ["compare", "Before and after"],
  ["chat", "Talk to the tutor"], ["desk", "Teacher's desk"]];
const OF_TAB = { conversation: "conversations", group: "conversations" };
const LOOK_EVERY_MS = 2500;

const main = document.getElementById("main");
const notice = document.getElementById("notice");
const state = { run: null, pulse: null, page: null, turn: 0 };

function complain(error) {
  notice.hidden = error === null;
  notice.textContent = error === null ? "" : error.message;
}

function place() {
  const [name, said = ""] = location.hash.replace(/^#\//, "").split("?", 2);
  return { name: name in PAGES ? name : "run", parameters: Object.fromEntries(new URLSearchParams(said)) };
}

async function open() {
  const { name, parameters } = place();
  const turn = ++state.turn;
  drawTabs(OF_TAB[name] ?? name);
  main.setAttribute("aria-busy", "true");
  try {
    state.run ??= await get("run");
    knowCriteria(state.run.criteria);
    document.getElementById("run-name").textContent = state.run.name;
    drawTabs(OF_TAB[name] ?? name);
    const host = el("div", { class: `page page-${name}` });
    const page = await PAGES[name](host, parameters, state.run, state.pulse);
    if (turn !== state.turn) return;
    state.page = page ?? {};
    show(main, host);
    state.page.shown?.();
    document.title = `${labelOf(OF_TAB[name] ?? name)} – ${state.run.name}`;
    complain(null);
  } catch (error) {
    if (turn !== state.turn) return;
    state.page = {};
    show(main);
    complain(error);
  } finally {
    if (turn === state.turn) main.removeAttribute("aria-busy");
  }
}

const labelOf = (tab) => tab === "chat" && state.run?.game ? "Take a seat" : TABS.find(([key]) => key === tab)[1];

function drawTabs(current) {
  const shown = TABS.filter(([name]) => name !== "desk" || current === "desk" || state.run?.supervised);
  show(document.getElementById("nav"), shown.map(([name]) =>
    el("a", { href: link(name), "aria-current": name === current ? "page" : null }, labelOf(name))));
}

function drawStatus(pulse) {
  const busy = pulse.playing > 0;
  const doing = busy ? `${plural(pulse.playing, "conversation")} being played`
    : state.run?.live ? "waiting" : "nothing is being played";
  show(document.getElementById("status"),
    el("span", { class: `dot ${busy ? "busy" : ""}`, "aria-hidden": "true" }),
    busy ? el("a", { href: link("conversations", { where: "now" }) }, doing) : doing,
    pulse.policy ? el("span", { class: "policy", title: `Teacher weights: ${pulse.policy}` },
      `policy ${pulse.policy.split(" ").at(-1)}`) : null);
}

async function look() {
  try {
    if (!document.hidden) {
      const pulse = await get("pulse");
      const before = state.pulse;
      state.pulse = pulse;
      const changed = (name) => before !== null && before[name] !== pulse[name];
      if (changed("shelf")) state.run = await get("run");
      drawStatus(pulse);
      await state.page?.update?.({ run: state.run, pulse, changed });
      if (notice.dataset.away) { complain(null); delete notice.dataset.away; }
    }
  } catch (error) {
    if (error.status === 0) notice.dataset.away = "yes";
    complain(error);
  }
  setTimeout(look, LOOK_EVERY_MS);
}

window.addEventListener("hashchange", () => { window.scrollTo(0, 0); open(); });
open().then(look);
