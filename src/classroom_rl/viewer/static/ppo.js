// PPO's figures over the steps: the critic, and how far the policy moves.

import { chart } from "./charts.js";
import { percent } from "./format.js";

const COLOURS = ["c1", "c2", "c3"];

/** The values, with those below the chart at its edge: the first explained variances may be far below. */
const within = (values, range) => values.map((value) => value === null || !range ? value : Math.max(value, range[0]));

/** The charts of a run with PPO; none for other runs. */
export function ppoCharts(steps, series, pick) {
  const drawn = (title, names, options = {}) => {
    const lines = names.filter(([name]) => series[`ppo/${name}`])
      .map(([name, label], i) => ({ label, colour: COLOURS[i], values: within(series[`ppo/${name}`], options.range) }));
    return lines.length ? chart(title, steps, lines, { pick, ...options }) : null;
  };
  return [
    drawn("What the critic explains", [["explained_variance", "explained variance of the returns"]],
      { range: [-1, 1], note: "1: it knows each return; 0: it knows only their mean. Measured before it learns from the batch." }),
    drawn("Critic and advantages", [["value_loss", "critic's loss"], ["returns_mean", "mean return"], ["advantage_std", "deviation of the advantages"]],
      { note: "In units of the reward." }),
    drawn("How far the policy moved", [["approx_kl", "KL within the batch, nats per token"]], { range: [0, null] }),
    drawn("Clipped tokens", [["clip_fraction", "policy"], ["value_clip_fraction", "critic"]], { range: [0, 1], format: percent, note: "Each is a share of the sampled tokens." }),
  ].filter(Boolean);
}
