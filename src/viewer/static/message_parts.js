// What a message is made of: spoken text, and thoughts, which are folded.

import { el, longText } from "./dom.js";

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
