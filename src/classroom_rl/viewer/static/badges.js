// Badges: a reward as a bar, a student's persona.

import { el, svg } from "./dom.js";
import { number } from "./format.js";

const MARKED = new Set(["error_student"]);

/** A reward as a number and a bar; `over` is false while the conversation is still being played. */
export function rewardBar(reward, over = true) {
  if (reward === null && !over) return el("span", { class: "reward none" }, "not yet");
  if (reward === null) return el("span", { class: "reward none", title: "no verdict, no reward" }, "none");
  const share = Math.min(1, Math.max(0, reward));
  return el("span", { class: "reward" },
    svg("svg", { viewBox: "0 0 40 6", "aria-hidden": "true" }, svg("rect", { class: "rail", width: 40, height: 6, rx: 3 }),
      svg("rect", { class: share < 0.34 ? "low" : share < 0.67 ? "middle" : "high", width: Math.max(2, 40 * share), height: 6, rx: 3 })),
    el("span", {}, number(reward, 2)));
}

/** A student's persona; the error persona is highlighted. */
export function personaBadge(name, count = null) {
  const kind = MARKED.has(name) ? "error" : name.includes("correct") ? "correct" : "plain";
  return el("span", { class: `badge persona ${kind}`, title: name }, `${count === null ? "" : `${count} `}${name.replaceAll("_", " ").replace(/ student$/, "")}`);
}
