// What a message is made of: spoken text, thoughts and calls of tools, which are folded.

import { el, longText } from "./dom.js";
import { words } from "./format.js";

/** Elements of a message's (kind, text) parts. */
export function messageParts(parts) {
  return parts.length ? parts.map(([kind, text]) => part(kind, text)) : el("em", {}, "(nothing)");
}

function part(kind, text) {
  const said = text.trim();
  if (!said) return null;
  if (kind === "said") return el("p", { class: "said" }, longText(said));
  return el("details", { class: "thought" }, el("summary", {}, "Thought"), el("p", {}, longText(said.replace(/^<think>|<\/think>$/g, "").trim())));
}

/** The tools that were called for a message, with their results; null if none were. */
export function toolCalls(calls) {
  return calls?.length ? el("ul", { class: "tool-calls", title: "Nobody but the tutor sees calls and results" }, calls.map(toolCall)) : null;
}

function toolCall(call) {
  return el("li", {}, el("details", { class: "tool-call" },
    el("summary", {}, el("code", {}, call.name || "unreadable call"),
      call.error ? el("span", { class: "badge bad" }, words(call.error)) : el("span", { class: "nr" }, `${call.seconds.toFixed(2)} s`)),
    el("pre", {}, longText(call.arguments)), el("pre", { class: "result" }, longText(call.result))));
}
