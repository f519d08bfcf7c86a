// Lets the user choose one of the sets of conversations in the run folder.

import { select } from "./dom.js";
import { setName } from "./format.js";

/** A <select> of all sets; the entries `more` come first. */
export function setSelect(label, run, value, onchange, more = [], properties = {}) {
  const steps = [...run.steps].reverse().map((step) => [`step-${step}`, setName(`step-${step}`)]);
  const evaluations = run.evaluations.map((name) => [`eval-${name}`, setName(`eval-${name}`)]);
  const groups = [...more];
  if (evaluations.length) groups.push({ label: "Evaluations", options: evaluations });
  if (steps.length) groups.push({ label: "Training", options: steps });
  return select(label, groups, value, onchange, properties);
}

/** The set that a list shows first: the latest step, else an evaluation, else what is being played. */
export function latestSet(run) {
  if (run.steps.length) return `step-${run.steps.at(-1)}`;
  return run.evaluations.length ? `eval-${run.evaluations.at(-1)}` : "now";
}
