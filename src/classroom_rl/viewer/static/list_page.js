// The list page: conversations of a step, of an evaluation or of all steps; filters, histogram of rewards, a table.

import { get, link } from "./api.js";
import { el, input, select, show, svg } from "./dom.js";
import { compact, number, plural, setName, stepShown, words } from "./format.js";
import { personaBadge, rewardBar } from "./badges.js";
import { latestSet, setSelect } from "./sets.js";

const PER_PAGE = 100;
const JUDGES = [["", "any"], ["failed", "an attempt failed"], ["unrewarded", "no verdict"], ["rejected", "rejected"]];
const REVIEWS = [["", "any"], ["invalid", "with an invalid message"], ["none", "with a failed review"]];
const CATEGORY = "category:";
const MOST_CATEGORIES = 2;
const ORDERS = [["played", "as played"], ["worst", "lowest reward"], ["best", "highest reward"], ["longest", "longest"]];

/** The list that was shown last; a conversation's previous and next ones are found in it. */
export const lastList = { parameters: null, ids: [] };

export async function listPage(host, given, run) {
  const parameters = { where: latestSet(run), ...given };
  const go = (change) => { location.hash = link("conversations", { ...parameters, offset: null, ...change }); };
  const filters = el("form", { class: "filters card", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() });
  const found = el("section", { "aria-label": "Conversations" });
  show(host, filters, found);
  const draw = async (its) => {
    const page = await get("conversations", { ...parameters, limit: PER_PAGE });
    lastList.parameters = { ...parameters };
    lastList.ids = page.columns.id;
    show(filters, drawFilters(page, parameters, its, go));
    show(found, summary(page, go), page.columns.id.length ? table(page) : nothing(page, parameters, its), pager(page, parameters));
  };
  await draw(run);
  const stamp = parameters.where === "now" ? "journal" : "shelf";
  return { update: ({ run: its, changed }) => (changed(stamp) && !filters.contains(document.activeElement) ? draw(its) : null) };
}

function drawFilters(page, parameters, run, go) {
  const many = [["now", "being played"], ["training", "all steps"]];
  return [
    setSelect("Conversations of", run, parameters.where, (where) => go({ where, sampling: null, review: null, category: null }), many, { id: "where" }),
    input("Lesson contains", parameters.problem, (problem) => go({ problem }), { type: "search", id: "problem", dir: "auto" }),
    el("div", { class: "pair" },
      input("Reward from", parameters.low, (low) => go({ low }), { type: "number", step: "0.05", id: "low" }),
      input("to", parameters.high, (high) => go({ high }), { type: "number", step: "0.05", id: "high" })),
    select("Persona", [["", "any"], ...page.personas.map((name) => [name, name.replaceAll("_", " ")])], parameters.persona ?? "", (persona) => go({ persona }), { id: "persona" }),
    select("Judge", JUDGES, parameters.judge ?? "", (judge) => go({ judge }), { id: "judge" }),
    page.reviewed ? supervisor(page, parameters, go) : null,
    page.samplings.length ? select("Sampling", [["", "any"], ...page.samplings.map((name) => [name, name])], parameters.sampling ?? "", (sampling) => go({ sampling }), { id: "sampling" }) : null,
    select("Order", ORDERS, parameters.sort ?? "played", (sort) => go({ sort }), { id: "sort" }),
  ];
}

function supervisor(page, parameters, go) {
  const categories = { label: "Invalid because of", options: page.categories.map((name) => [`${CATEGORY}${name}`, words(name) || "(none)"]) };
  const chosen = parameters.category ? `${CATEGORY}${parameters.category}` : parameters.review ?? "";
  const change = (value) => go(value.startsWith(CATEGORY) ? { review: null, category: value.slice(CATEGORY.length) } : { review: value, category: null });
  return select("Supervisor", page.categories.length ? [...REVIEWS, categories] : REVIEWS, chosen, change, { id: "review" });
}

function summary(page, go) {
  const filtered = page.matching !== page.total;
  return el("div", { class: "summary" },
    el("div", {}, el("h2", {}, setName(page.where)),
      el("p", { id: "count" }, filtered ? `${page.matching.toLocaleString("en")} of ${plural(page.total, "conversation")}` : plural(page.total, "conversation"),
        page.mean === null ? null : `, mean reward ${number(page.mean)}`)),
    histogram(page, go));
}

function histogram({ histogram: counts, edges }, go) {
  const most = Math.max(...counts);
  if (!most) return null;
  const width = 9, all = counts.length * width;
  const zero = width * edges.indexOf(0);
  const bars = counts.map((count, i) => {
    const height = count ? Math.max(2, 44 * count / most) : 0;
    const low = edges[i], high = edges[i + 1], last = i === counts.length - 1; // only the last bin holds its upper edge
    return svg("g", { class: "bar", onclick: () => go({ low, high: last ? high : Number((high - (high - low) * 1e-4).toPrecision(12)) }) },
      svg("title", {}, `${low} to ${high}: ${plural(count, "conversation")}`),
      svg("rect", { class: "hit", x: i * width, y: 0, width, height: 46 }),
      svg("rect", { class: "fill", x: i * width + 1, y: 46 - height, width: width - 2, height, rx: 1 }));
  });
  return el("figure", { class: "spread" },
    svg("svg", { viewBox: `0 0 ${all} 46`, role: "img", "aria-label": `Rewards from ${edges[0]} to ${edges.at(-1)}` }, bars,
      zero > 0 ? svg("line", { class: "zero", x1: zero, x2: zero, y1: 0, y2: 46 }, svg("title", {}, "0")) : null),
    el("figcaption", {}, el("span", {}, compact(edges[0])), el("span", {}, "reward"), el("span", {}, compact(edges.at(-1)))));
}

function table(page) {
  const columns = page.columns;
  const oneStep = new Set(columns.step).size === 1;
  return el("div", { class: "scroll card" }, el("table", { class: "list" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Reward"), el("th", { scope: "col" }, "Lesson"),
      oneStep ? null : el("th", { scope: "col" }, "Step"), el("th", { scope: "col" }, "Student"),
      el("th", { scope: "col", class: "right" }, "Messages"), el("th", { scope: "col" }, "Personas"), el("th", { scope: "col" }, ""))),
    el("tbody", {}, columns.id.map((id, i) => row(page, i, oneStep)))));
}

function row(page, i, oneStep) {
  const of = (name) => page.columns[name][i];
  const address = link("conversation", { where: page.where, id: of("id") });
  const open = (event) => { if (!event.target.closest("a")) location.hash = address; };
  const flags = [of("judge_failed") && ["bad", "judge failed"], of("failed") && ["bad", "broken off"], of("rejected") && ["bad", "rejected"],
    ...invalid(of("categories")), of("without_review") && ["plain", "review failed"], of("state") !== "END" && ["busy", "playing"], of("sampling") && ["plain", of("sampling")]].filter(Boolean);
  return el("tr", { onclick: open },
    el("td", {}, rewardBar(of("reward"), of("state") === "END")),
    el("td", { class: "lesson" }, el("a", { href: address, dir: "auto" }, of("title") || "(no text)")),
    oneStep ? null : el("td", {}, of("step") === null ? "–" : String(stepShown(of("step")))),
    el("td", { dir: "auto" }, of("student_name") ?? "–"),
    el("td", { class: "right" }, String(of("messages"))),
    el("td", {}, Object.entries(of("personas")).map(([name, count]) => personaBadge(name, count))),
    el("td", { class: "flags" }, flags.map(([kind, label]) => el("span", { class: `badge ${kind}` }, label)),
      of("problem_id") ? el("a", { class: "quiet", href: link("group", { where: page.where === "training" ? `step-${of("step")}` : page.where, problem_id: of("problem_id"), sampling: of("sampling") }) }, "group") : null));
}

/** The commonest categories of a conversation's invalid messages, and how many more there are. */
function invalid(categories) {
  const sorted = Object.entries(categories).sort(([, a], [, b]) => b - a);
  const shown = sorted.slice(0, MOST_CATEGORIES).map(([name, count]) => ["invalid", `${count === 1 ? "" : `${count} `}${words(name) || "invalid"}`]);
  return sorted.length > MOST_CATEGORIES ? [...shown, ["invalid", `${sorted.length - MOST_CATEGORIES} more`]] : shown;
}

function nothing(page, parameters, run) {
  const filtered = page.total > 0;
  const text = filtered ? "No conversation passes these filters." : page.where === "now" ? "Nothing is being played: all conversations are in the steps and evaluations."
    : "This set is empty.";
  return el("p", { class: "empty card" }, text, " ",
    filtered ? el("a", { href: link("conversations", { where: parameters.where }) }, "Clear the filters")
      : page.where === "now" && latestSet(run) !== "now" ? el("a", { href: link("conversations", { where: latestSet(run) }) }, `See ${setName(latestSet(run))}`) : null);
}

function pager(page, parameters) {
  if (page.matching <= PER_PAGE) return null;
  const last = Math.min(page.matching, page.offset + PER_PAGE);
  const to = (offset, label) => offset >= 0 && offset < page.matching
    ? el("a", { class: "button", href: link("conversations", { ...parameters, offset }) }, label) : el("span", { class: "button off" }, label);
  return el("nav", { class: "pager", "aria-label": "Pages of the list" }, to(page.offset - PER_PAGE, "Back"),
    el("span", {}, `${page.offset + 1}–${last} of ${page.matching.toLocaleString("en")}`), to(page.offset + PER_PAGE, "Next"));
}
