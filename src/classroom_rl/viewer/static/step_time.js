// Where the time of the last steps went, as one bar, and what would shorten them.

import { el, svg } from "./dom.js";
import { percent } from "./format.js";

const PHASES = { play: ["messages", "c1"], judging: ["judging alone", "c4"], publish: ["publishing weights", "c3"], train: ["training", "c2"] };
const WIDTH = 1000, HEIGHT = 16;

/** The card; null for a run without steps. */
export function timeCard({ time_shares: shares, time_advice: advice }) {
  const shown = Object.entries(PHASES).filter(([phase]) => shares[phase] > 0)
    .map(([phase, [label, colour]]) => ({ label: `${label} ${percent(shares[phase])}`, colour, share: shares[phase] }));
  if (!shown.length) return null;
  let left = 0;
  const bar = svg("svg", { class: "shares", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": shown.map(({ label }) => label).join(", ") });
  for (const { colour, share } of shown) {
    bar.append(svg("rect", { class: `area ${colour}`, x: left * WIDTH, width: share * WIDTH, height: HEIGHT }));
    left += share;
  }
  return el("div", { class: "card step-time" }, el("h2", {}, "Where the time goes"), bar,
    el("ul", { class: "legend" }, shown.map(({ label, colour }) => el("li", {}, el("span", { class: `key line ${colour}`, "aria-hidden": "true" }), label))),
    advice ? el("p", { class: "advice" }, advice) : null);
}
