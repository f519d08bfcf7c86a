// Formats numbers and names.

export function number(value, digits = 3) {
  return value === null || value === undefined ? "–" : value.toFixed(digits).replace(/^-(?=[0.]*$)/, ""); // no −0.000
}

export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(digits)}`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${Number((100 * value).toFixed(value < 0.1 ? 1 : 0))} %`;
}

/** A number of any size in few characters. */
export function compact(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 10000) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
  if (size < 0.001) return value.toExponential(0).replace("e", "e").replace("-", "−");
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

/** Seconds, rounded for reading. */
export function seconds(value) {
  return value === null || value === undefined ? "–" : value.toFixed(value < 1 ? 2 : value < 10 ? 1 : 0);
}

export function dollars(value) {
  return value === null || value === undefined ? "–" : `$${value.toFixed(value < 1 ? 4 : 2)}`;
}

export function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

const tops = {};

/** Take in the judge's criteria, by name the most that can be given, as the run's description has them. */
export function knowCriteria(criteria) {
  Object.assign(tops, criteria);
}

/** The most that a judge gives for this criterion. */
export function topOf(name) {
  return tops[name] ?? 1;
}

/** `task_final_score` as "task final". */
export function words(name) {
  return name.replace(/_(score|reasoning)$/, "").replaceAll("_", " ");
}

/** A batch's step as people count: files and addresses count the steps that were complete when it was played, charts
 *  and the trainer the steps trained, from 1. */
export const stepShown = (step) => Number(step) + 1;

/** The name of a set of conversations: "step-12" as "step 13", the first step that was trained on it. */
export function setName(where) {
  if (where === "now") return "being played";
  if (where === "training") return "all steps";
  if (where === "eval-evaluation") return "evaluation";
  if (where.startsWith("eval-")) return `held out, ${where.slice(5)}`;
  if (where.startsWith("step-")) return `step ${stepShown(where.slice(5))}`;
  return where.replace("-", " ");
}
