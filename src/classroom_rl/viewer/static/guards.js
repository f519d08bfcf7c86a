// The guards: whether the tutor learned, and whether its judge is being fooled.

import { chart } from "./charts.js";
import { el } from "./dom.js";
import { plural, stepShown } from "./format.js";

const CANARY = "guard/canary_";
const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6"];

/** The results of the guards in words; null without any. */
export function guardCard(guards, step) {
  const warned = guards.warnings.length > 0;
  if (guards.verdict === null && !warned && !guards.failed) return null;
  return el("div", { class: "card guards" }, guards.verdict === null ? null : learned(guards, step), warned || guards.failed ? doubted(guards) : null);
}

function learned(guards, step) {
  const yes = guards.verdict === "learned";
  const since = guards.steps !== null && guards.steps < step ? `, as of step ${guards.steps}` : "";
  return [el("h2", {}, "Did the tutor learn? ", el("span", { class: `badge ${yes ? "correct" : "bad"}` }, yes ? "Yes" : "No evidence of it"), since),
    el("ul", {}, guards.reasons.map((reason) => el("li", {}, reason)))];
}

function doubted(guards) {
  return [el("h2", {}, "Is the judge being fooled? ", guards.warnings.length
    ? el("span", { class: "badge bad" }, `${plural(guards.warnings.length, "warning")} in ${plural(guards.checks, "check")}`) : null),
    guards.failed ? el("p", { class: "wrong" }, `${guards.failed} of ${plural(guards.failed + guards.checks, "attempt")} to check it brought no score.`) : null,
    el("ul", {}, guards.warnings.slice(0, 3).map(([step, text]) => el("li", {}, `Step ${stepShown(step)}: ${text}`)))];
}

/** A chart of the checks of the judge, over the steps with a check. */
export function guardCharts(steps, series, pick) {
  const canaries = Object.keys(series).filter((name) => name.startsWith(CANARY));
  const gaps = ["guard/gap", "guard/gap_growth"].filter((name) => series[name]);
  return [
    gaps.length && checked("Training's judge against the held-out one", steps, series, gaps, ["how much more it gives", "of that, since the run began"],
      { note: "Both judge the same conversations, from 0 to 1; the held-out one is not trained on.", pick }),
    canaries.length && checked("Planted conversations", steps, series, canaries, canaries.map((name) => name.slice(CANARY.length).replaceAll("_", " ")),
      { range: [0, 1], note: "What the training's judge gives to teachers that deserve nothing.", pick }),
  ].filter(Boolean);
}

function checked(title, steps, series, names, labels, options) {
  const kept = steps.flatMap((_, i) => names.some((name) => series[name][i] !== null) ? [i] : []);
  const lines = names.map((name, n) => ({ label: labels[n], colour: COLOURS[n % COLOURS.length], values: kept.map((i) => series[name][i]) }));
  return kept.length ? chart(title, kept.map((i) => steps[i]), lines, options) : null;
}
