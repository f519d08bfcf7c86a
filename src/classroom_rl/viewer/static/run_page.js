// The page of the run: current figures, and charts over its steps.

import { get, link } from "./api.js";
import { chart, edges, interval } from "./charts.js";
import { el, show } from "./dom.js";
import { dollars, number, percent, seconds, signed, topOf, words } from "./format.js";
import { guardCard, guardCharts } from "./guards.js";
import { ppoCharts } from "./ppo.js";
import { timeCard } from "./step_time.js";
import { supervisionCharts } from "./supervision.js";

const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6"];
const COST = "/run_cost_usd";

export async function runPage(host, _parameters, run, pulse) {
  const tiles = el("section", { class: "tiles", "aria-label": "The moment" });
  const guards = el("section", { "aria-label": "Learning and judge" });
  const charts = el("section", { class: "charts", "aria-label": "Over the steps" });
  const time = el("section", { "aria-label": "Where the time goes" });
  show(host, tiles, guards, time, charts, facts(run));
  const draw = async (now, its) => {
    const [metrics, found] = await Promise.all([get("metrics"), get("guards")]);
    show(tiles, drawTiles(metrics, now, its));
    show(guards, guardCard(found, metrics.steps.at(-1)));
    show(time, timeCard(metrics));
    show(charts, drawCharts(metrics, its));
  };
  await draw(pulse ?? await get("pulse"), run);
  return {
    update: ({ run: its, pulse: now, changed }) =>
      ["metrics", "shelf", "journal", "policy"].some(changed) ? draw(now, its) : null,
  };
}

function drawTiles(metrics, pulse, run) {
  const { last, series } = metrics;
  const step = metrics.steps.at(-1) ?? 0;
  const held = heldOut(metrics.marks);
  const payees = Object.keys(last).filter((name) => name.endsWith(COST) && last[name] !== undefined);
  const cost = payees.length ? payees.reduce((sum, name) => sum + last[name], 0) : pulse.spent_usd;
  return [
    tile("Step", `${step}`, metrics.max_steps ? `of ${metrics.max_steps}` : "", metrics.max_steps ? step / metrics.max_steps : null),
    tile("Reward", number(last.reward), last.reward_std === undefined ? "" : `± ${number(last.reward_std)} in the batch`),
    held && tile("Held-out reward", number(held.now), held.before === null ? held.sampling : `${signed(held.now - held.before)} since before, ${held.sampling}`),
    tile("Judge failures", percent(last["judge/failed_share"]), "of the last batch"),
    series["supervision/valid_share"] && tile("Valid messages", percent(last["supervision/valid_share"]), "of the last batch, says the supervisor", null, link("desk")),
    tile("Cost", cost === null ? "nothing" : dollars(cost), cost === null ? "no model behind an API" : payees.length === 1 ? `of the ${payees[0].slice(0, -COST.length)}, so far` : "of all models behind an API, so far"),
    tile("Policy", pulse.policy ? pulse.policy.split(" ").at(-1) : "–", pulse.policy ? pulse.policy.split(" ").slice(0, -1).join(" ") : "nothing published"),
    tile("Being played", String(pulse.playing), pulse.played ? `${pulse.played} of the batch have ended` : "conversations", null,
      pulse.playing + pulse.played ? link("conversations", { where: "now" }) : null),
    series.step_time && tile("A step takes", `${seconds(last.step_time)} s`, phases(last)),
  ].filter(Boolean);
}

function phases(last) {
  return ["rollout", "train", "publish"].filter((name) => last[`seconds/${name}`] !== undefined)
    .map((name) => `${name} ${seconds(last[`seconds/${name}`])}`).join(", ");
}

function heldOut(marks) {
  if (!marks.length) return null;
  const during = marks.filter(({ step }) => step !== null);
  const sampling = (during[0] ?? marks[0]).sampling;
  const own = during.filter((mark) => mark.sampling === sampling);
  if (own.length) return { now: own.at(-1).mean, before: own.length > 1 ? own[0].mean : null, sampling };
  const of = (name) => marks.find((mark) => mark.name === name && mark.sampling === sampling)?.mean ?? null;
  const after = of("after");
  return after === null ? { now: marks[0].mean, before: null, sampling: `${marks[0].name}, ${sampling}` }
    : { now: after, before: of("before"), sampling };
}

function tile(label, value, note, share = null, href = null) {
  const inside = [el("h3", {}, label), el("p", { class: "figure" }, value), note ? el("p", { class: "note" }, note) : null,
    share === null ? null : el("progress", { max: "1", value: share, "aria-label": `${label}: ${value} ${note}` })];
  return href ? el("a", { class: "tile card", href }, inside) : el("div", { class: "tile card" }, inside);
}

function drawCharts(metrics, run) {
  const { steps, series } = metrics;
  if (!steps.length) return el("p", { class: "empty card" }, run.steps.length ? "No step was logged yet." : "No step has been trained yet.");
  const sampled = (step) => { location.hash = link("conversations", { where: `step-${playedFor(step, run.steps)}` }); };
  const pick = run.steps.length ? sampled : null;
  const line = (names, labels) => names.filter((name) => series[name]).map((name, i) => ({
    label: labels?.[i] ?? words(name.split("/").filter((part) => part !== "mean").at(-1)), colour: COLOURS[i % COLOURS.length],
    values: series[name].map((value) => value === null ? null : value / topOf(name.split("/").at(-1))),
  }));
  const named = (prefix, suffix) => Object.keys(series).filter((name) => name.startsWith(prefix) && name.endsWith(suffix));
  const reward = line(["reward"], ["training reward"]).map((each) => ({ ...each, spread: series.reward_std }));
  const parts = line([...new Set([...Object.keys(run.criteria).map((name) => `judge/${name}`), ...named("judge/", "_score")])]);
  const rewards = line(named("rewards/", "/mean"));
  const paid = named("", COST);
  const costs = line(paid, paid.map((name) => name.slice(0, -COST.length)));
  const groups = [
    reward.length && chart("Reward", steps, reward, { range: withinOne(edges(series.reward, series.reward_std)), pick,
      note: pick ? "Band: spread in the batch. Choose a step to see its conversations." : "Band: spread in the batch." }),
    heldOutChart(metrics.marks, steps.at(-1)),
    duringChart(metrics),
    parts.length && chart("What the judge says", steps, parts, { range: [0, 1], note: "Means of the batch, each as a share of the most that can be given.", pick }),
    rewards.length > 1 && chart("Parts of the reward", steps, rewards, { pick }),
    series["seconds/rollout"] && chart("Seconds per step", steps, line(["seconds/rollout", "seconds/train", "seconds/publish"]), { stack: true }),
    series["judge/failed_share"] && chart("Judge failures and rejections", steps, line(["judge/failed_share", "conversation/rejected_share", "judge/beyond_rules_share"], ["without a verdict", "rejected", "beyond what rules can read"]),
      { range: [0, Math.max(...series["judge/failed_share"], ...(series["conversation/rejected_share"] ?? [0]), ...(series["judge/beyond_rules_share"] ?? [0])) > 0.05 ? null : 0.1], format: percent, pick }),
    costs.length && chart("Cost so far", steps, costs, { range: [0, null], format: dollars }),
    series["conversation/teacher_tokens"] && chart("Length", steps, line(["conversation/teacher_tokens"], ["teacher's tokens per conversation"]), { range: [0, null], pick }),
    series["frac_reward_zero_std"] && chart("Groups without variance", steps, line(["frac_reward_zero_std"], ["share of groups"]), { range: [0, 1], format: percent, note: "They teach nothing: all their conversations were worth the same.", pick }),
    series["level/first_half"] && chart("Messages at the lesson's level", steps, line(["level/first_half", "level/second_half"], ["first half of a conversation", "second half"]),
      { range: [0, 1], note: "Mean score of the turn reward level in the batch.", pick }),
    ...supervisionCharts(steps, series, pick),
    ...ppoCharts(steps, series, pick),
    ...guardCharts(steps, series, pick),
    series["mismatch/mean_abs_logprob_diff"] && chart("Engine against trainer", steps, line(["mismatch/mean_abs_logprob_diff"], ["mean difference of log-probs"]), { range: [0, null] }),
  ];
  return groups.filter(Boolean);
}

/** The range of a chart of rewards: 0 to 1 if all lie within, else (null) as far as they reach. */
function withinOne(values) {
  return values.every((value) => value >= 0 && value <= 1) ? [0, 1] : null;
}

/** The step whose conversations a logged step was trained on: the last batch that began before it. */
function playedFor(step, played) {
  return played.filter((each) => each < step).at(-1) ?? played[0];
}

/** A chart of its own: other lessons, another sampling, perhaps another judge than the training's reward. */
function heldOutChart(marks, last) {
  const found = marks.filter(({ name }) => name === "before" || name === "after");
  if (!found.length) return null;
  const samplings = [...new Set(found.map(({ sampling }) => sampling))];
  const colour = (sampling) => COLOURS[1 + samplings.indexOf(sampling)];
  const shown = found.map(({ name, sampling, mean, low, high }) => ({ label: `${sampling}, ${name}`, colour: colour(sampling), first: name === "before", value: mean, low, high }));
  const meanOf = (sampling, when) => found.find((mark) => mark.sampling === sampling && mark.name === when)?.mean ?? null;
  const lines = samplings.map((sampling) => ({ label: sampling, colour: colour(sampling), values: [meanOf(sampling, "before"), meanOf(sampling, "after")] }));
  return chart("Reward on held-out lessons", [0, last], lines,
    { range: withinOne(shown.flatMap(interval)), marks: shown, note: "Before and after the training, with 95 % intervals." });
}

/** The evaluations during the training, as curves with their 95 % intervals. */
function duringChart({ marks, collapse }) {
  const during = marks.filter(({ step }) => step !== null);
  if (!during.length) return null;
  const steps = [...new Set(during.map(({ step }) => step))];
  const lines = [...new Set(during.map(({ sampling }) => sampling))].map((sampling, i) => {
    const own = steps.map((step) => during.find((mark) => mark.step === step && mark.sampling === sampling));
    return { label: sampling, colour: COLOURS[1 + i], values: own.map((mark) => mark?.mean ?? null),
      spread: own.map((mark) => mark && mark.low !== null ? (mark.high - mark.low) / 2 : null) };
  });
  const note = collapse.length ? `Collapse: ${collapse.join("; ")}.` : "Bands as wide as 95 % intervals over lessons.";
  return chart("Held-out reward during training", steps, lines, { range: withinOne(during.map(({ mean }) => mean)), note });
}

function facts(run) {
  return el("section", { class: "card facts" }, el("h2", {}, "Configured"),
    el("dl", {}, run.facts.map(([label, value]) => [el("dt", {}, label), el("dd", { dir: "auto" }, value)]),
      el("dt", {}, "run folder"), el("dd", { dir: "auto" }, run.folder)));
}
