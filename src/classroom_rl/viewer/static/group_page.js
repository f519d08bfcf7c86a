// The page of a group: its conversations side by side, as GRPO compares them.

import { get, link } from "./api.js";
import { title } from "./conversation_page.js";
import { column } from "./conversation_view.js";
import { el, longText, show } from "./dom.js";
import { number, plural, setName, signed } from "./format.js";

export async function groupPage(host, { where, problem_id, sampling }) {
  const group = await get("group", { where, problem_id, sampling });
  const columns = el("div", { class: "columns", tabindex: "0", "aria-label": "Conversations of the group" });
  const shown = group.conversations.map((conversation, i) => ({ conversation, i }));
  const draw = (sorted) => show(columns, sorted.map(({ conversation, i }) =>
    column(conversation, heading(conversation, i, sampling), link("conversation", { where, id: conversation.id }), advantage(conversation, group))));
  const order = el("button", { type: "button", class: "toggle", "aria-pressed": "false", onclick: () => {
    const on = order.getAttribute("aria-pressed") !== "true";
    order.setAttribute("aria-pressed", String(on));
    draw(on ? [...shown].sort(bestFirst) : shown);
  } }, "Best first");
  draw(shown);
  show(host,
    el("header", { class: "heading" },
      el("nav", { class: "crumbs", "aria-label": "Where this is" }, el("a", { href: link("conversations", { where }) }, setName(where)), " / ", "group"),
      el("h1", { dir: "auto" }, title(group.problem)),
      el("p", { class: "note" }, `${plural(group.total, "conversation")} on this lesson`, group.mean === null ? "" : `, mean reward ${number(group.mean)} ± ${number(group.std)}`,
        group.total > group.conversations.length ? `; the first ${group.conversations.length} are shown` : ""),
      el("details", {}, el("summary", {}, "Lesson"), el("p", { class: "text" }, longText(group.problem))), el("div", { class: "bar" }, order)),
    columns);
}

/** Those without a reward come last, also after rewards below 0. */
function bestFirst({ conversation: { reward: a } }, { conversation: { reward: b } }) {
  return a === null || b === null ? (a === null) - (b === null) : b - a;
}

function heading(conversation, i, sampling) {
  return conversation.sampling && !sampling ? `${conversation.sampling}, ${i + 1}` : `Conversation ${i + 1}`;
}

function advantage(conversation, group) {
  if (conversation.reward === null || group.mean === null || !conversation.where.startsWith("step-")) return null;
  const ahead = conversation.reward - group.mean;
  return el("span", { class: `advantage ${ahead > 0 ? "up" : ahead < 0 ? "down" : ""}`, title: "reward − mean of the group: what GRPO pushes by" }, signed(ahead, 2));
}
