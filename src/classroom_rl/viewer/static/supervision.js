// The supervisor's figures over the steps: valid messages, categories, corrections.

import { chart } from "./charts.js";
import { percent, words } from "./format.js";

const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9", "c10", "c11"];
const CATEGORY = "supervision/category/";
const SHARES = [["supervision/valid_share", "valid"], ["supervision/no_verdict_share", "without a verdict"],
  ["supervision/replaced_share", "replaced"], ["supervision/retried_share", "written again"], ["supervision/reviewed_share", "reviewed"]];

const total = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0);

/** The charts of a run with a supervisor; none for other runs. */
export function supervisionCharts(steps, series, pick) {
  const lines = (names) => names.filter(([name]) => series[name] && (name !== "supervision/replaced_share" && name !== "supervision/retried_share" || total(series[name])))
    .map(([name, label], i) => ({ label, colour: COLOURS[i], values: series[name] }));
  const drawn = (title, names, options = {}) => {
    const found = lines(names);
    return found.length ? chart(title, steps, found, { pick, ...options }) : null;
  };
  return [
    drawn("The tutor's messages, as reviewed", SHARES, { range: [0, 1], format: percent, note: "Each is a share of the tutor's messages in the batch." }),
    categories(steps, series, pick),
    drawn("Reward per message", [["supervision/process_reward", "process reward, mean over messages"]], { note: "0 is a valid message; penalties are below 0." }),
    drawn("Messages per dialogue", [["supervision/messages_per_dialogue", "tutor's messages"]], { range: [0, null], note: "If it falls, the tutor may be avoiding penalties by ending early." }),
    drawn("Learning from corrections", [["corrections/ce_loss", "cross-entropy in the step"], ["corrections/pass_loss", "of a supervised pass"]], { range: [0, null] }),
    drawn("Corrections", [["corrections/rows", "trained on in the step"], ["corrections/waiting", "waiting for a pass"]], { range: [0, null] }),
    passes(steps, series),
  ].filter(Boolean);
}

function categories(steps, series, pick) {
  const names = Object.keys(series).filter((name) => name.startsWith(CATEGORY)).sort();
  const found = names.map((name, i) => ({ label: words(name.slice(CATEGORY.length)), colour: COLOURS[i % COLOURS.length], values: series[name] }))
    .filter(({ values }) => total(values) > 0).sort((a, b) => total(b.values) - total(a.values));
  return found.length ? chart("What is wrong with messages", steps, found, { bars: true, range: [0, null], format: percent, pick,
    note: "Each category's share of the reviewed messages." }) : null;
}

/** The divergence after each supervised pass, at the steps that had one. */
function passes(steps, series) {
  const kl = series["corrections/pass_kl"];
  const ran = kl ? steps.flatMap((_, i) => kl[i] === null ? [] : [i]) : [];
  if (!ran.length) return null;
  return chart("Supervised passes", ran.map((i) => steps[i]), [{ label: "KL on the tutor's own messages", colour: "c1", values: ran.map((i) => kl[i]) }],
    { range: [0, null], note: "How far each pass moved the tutor." });
}
