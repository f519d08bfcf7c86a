// The comparison page: the same lessons before and after training, or in any two sets.

import { get, link } from "./api.js";
import { title } from "./conversation_page.js";
import { column } from "./conversation_view.js";
import { el, longText, select, show } from "./dom.js";
import { number, plural, setName, signed } from "./format.js";
import { rewardBar } from "./badges.js";
import { setSelect } from "./sets.js";

const PER_PAGE = 50;
const PAIRS = 4;
const ORDERS = [["played", "as played"], ["risen", "risen most"], ["fallen", "fallen most"]];

export async function comparePage(host, given, run) {
  const parameters = { ...sides(run), ...given };
  if (!parameters.left || !parameters.right) {
    show(host, el("p", { class: "empty card" }, "There is nothing to compare yet: it takes two sets of conversations. eval.py writes eval/before and eval/after."));
    return {};
  }
  return parameters.problem_id ? pairs(host, parameters) : lessons(host, parameters, run);
}

function sides(run) {
  if (run.evaluations.length > 1) return { left: `eval-${run.evaluations[0]}`, right: `eval-${run.evaluations[1]}` };
  return run.steps.length > 1 ? { left: `step-${run.steps[0]}`, right: `step-${run.steps.at(-1)}` } : {};
}

async function lessons(host, parameters, run) {
  const go = (change) => { location.hash = link("compare", { ...parameters, offset: null, ...change }); };
  const found = await get("compare", { ...parameters, limit: PER_PAGE });
  if (!parameters.sampling && found.samplings.length) parameters.sampling = found.samplings[0];
  const comparison = parameters.sampling ? await get("compare", { ...parameters, limit: PER_PAGE }) : found;
  const columns = comparison.columns;
  show(host,
    el("form", { class: "filters card", "aria-label": "What is compared", onsubmit: (event) => event.preventDefault() },
      setSelect("Before", run, parameters.left, (left) => go({ left, sampling: null }), [], { id: "left" }), setSelect("After", run, parameters.right, (right) => go({ right, sampling: null }), [], { id: "right" }),
      found.samplings.length ? select("Sampling", found.samplings.map((name) => [name, name]), parameters.sampling, (sampling) => go({ sampling }), { id: "sampling" }) : null,
      select("Order", ORDERS, parameters.sort ?? "played", (sort) => go({ sort }), { id: "sort" })),
    el("div", { class: "summary" }, el("div", {}, el("h2", {}, `${setName(parameters.left)} → ${setName(parameters.right)}`),
      el("p", {}, plural(comparison.total, "lesson"), comparison.rewarded < comparison.total ? `, ${comparison.rewarded} with rewards on both sides` : "",
        comparison.mean_left === null ? "" : `, mean reward ${number(comparison.mean_left)} → ${number(comparison.mean_right)}`))),
    comparison.total ? el("div", { class: "scroll card" }, el("table", { class: "list" },
      el("thead", {}, el("tr", {}, ["Lesson", "Before", "After", "Change"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, columns.problem_id.map((problem_id, i) => row(parameters, problem_id, columns, i)))))
      : el("p", { class: "empty card" }, "These two have no lesson in common."),
    pager(comparison, parameters));
  return {};
}

function row(parameters, problem_id, columns, i) {
  const address = link("compare", { ...parameters, offset: null, problem_id });
  const [left, right] = [columns.left[i], columns.right[i]];
  const change = left === null || right === null ? null : right - left;
  return el("tr", { onclick: (event) => { if (!event.target.closest("a")) location.hash = address; } },
    el("td", { class: "lesson" }, el("a", { href: address, dir: "auto" }, columns.title[i])),
    el("td", {}, rewardBar(left)), el("td", {}, rewardBar(right)),
    el("td", {}, el("span", { class: `advantage ${change > 0 ? "up" : change < 0 ? "down" : ""}` }, signed(change, 2))));
}

function pager(comparison, parameters) {
  if (comparison.total <= PER_PAGE) return null;
  const to = (offset, label) => offset >= 0 && offset < comparison.total
    ? el("a", { class: "button", href: link("compare", { ...parameters, offset }) }, label) : el("span", { class: "button off" }, label);
  return el("nav", { class: "pager", "aria-label": "Pages of the list" }, to(comparison.offset - PER_PAGE, "Back"),
    el("span", {}, `${comparison.offset + 1}–${Math.min(comparison.total, comparison.offset + PER_PAGE)} of ${comparison.total}`), to(comparison.offset + PER_PAGE, "Next"));
}

async function pairs(host, parameters) {
  const { left, right, problem_id, sampling } = parameters;
  const [before, after] = await Promise.all([left, right].map((where) => get("group", { where, problem_id, sampling, limit: PAIRS })));
  const count = Math.max(before.conversations.length, after.conversations.length);
  const side = (group, i, where) => {
    const conversation = group.conversations[i];
    return conversation ? column(conversation, setName(where), link("conversation", { where, id: conversation.id })) : el("div", {});
  };
  show(host,
    el("header", { class: "heading" },
      el("nav", { class: "crumbs", "aria-label": "Where this is" }, el("a", { href: link("compare", { ...parameters, problem_id: null }) }, `${setName(left)} → ${setName(right)}`), " / ", "lesson"),
      el("h1", { dir: "auto" }, title(before.problem)),
      el("p", { class: "note" }, `Mean reward ${number(before.mean)} → ${number(after.mean)}`, sampling ? `, ${sampling}` : ""),
      el("details", {}, el("summary", {}, "Lesson"), el("p", { class: "text" }, longText(before.problem)))),
    Array.from({ length: count }, (_, i) => el("div", { class: "pairs" }, side(before, i, left), side(after, i, right))));
  return {};
}
