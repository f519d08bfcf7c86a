// A supervisor's reviews: badges, and a message's drafts, corrections and what the student heard, side by side.

import { el, longText } from "./dom.js";
import { compact, words } from "./format.js";
import { messageParts, toolCalls } from "./message_parts.js";

const SOURCES = { rules: "by rules", model: "by a model", human: "by a person" };

/** Valid, a category, or no verdict; null without a review. */
export function reviewBadge(review) {
  if (!review) return null;
  if (review.valid === null) return el("span", { class: "badge unsure", title: review.error ?? "The supervisor gave no verdict" }, "no verdict");
  if (review.valid) return el("span", { class: "badge correct", title: "The supervisor calls it valid" }, "✓ valid");
  return el("span", { class: "badge bad", title: "The supervisor calls it invalid" }, words(review.category) || "invalid");
}

/** The badges of a message: its review, and what became of its drafts. */
export function turnBadges(turn) {
  const rejected = turn.drafts?.length ?? 0;
  return [
    turn.replaced ? el("span", { class: "badge busy", title: "The supervisor's correction stands in place of what the tutor wrote" }, "replaced") : null,
    turn.replaced ? el("span", { title: "Of the draft" }, reviewBadge(turn.review)) : reviewBadge(turn.review),
    rejected && !turn.replaced ? el("span", { class: "badge busy", title: "The tutor wrote it again" }, `attempt ${rejected + 1}`) : null,
  ];
}

/** Whether a message has anything to set beside it. */
export function hasVersions(turn) {
  return Boolean(turn.drafts?.length || turn.replaced || turn.review?.valid === false);
}

/** A message's drafts, their corrections, and what the student heard, side by side: a row for each draft. */
export function versions(turn) {
  const { drafts, review, replaced } = turn;
  const last = drafts.length - 1;
  const ownReview = replaced && drafts.length ? null : review; // that of a replaced message is its draft's
  const heard = [
    version(replaced ? "What the student heard: the correction" : "What the student heard", "heard", [messageParts(turn.parts), toolCalls(turn.tool_calls)], ownReview ? reviewBox(ownReview) : null),
    replaced ? null : correctionVersion(ownReview)];
  const rows = drafts.map((draft, i) => [
    version(drafts.length > 1 ? `Draft ${i + 1}` : "Draft", "draft", [messageParts(draft.parts), toolCalls(draft.tool_calls)], reviewBox(draft.review)),
    replaced && i === last ? null : correctionVersion(draft.review), i === last ? heard : null]);
  return (rows.length ? rows : [heard]).map((row) => el("div", { class: "versions" }, row));
}

export function version(label, kind, text, more = null) {
  return el("section", { class: `version ${kind}` }, el("h4", {}, label), el("div", { class: "words" }, text), more);
}

/** The correction of a review, or the one that was refused; null if there is none. */
export function correctionVersion(review) {
  if (!review) return null;
  if (review.refused_correction !== null) {
    return version("Correction, refused", "refused", review.refused_text ? el("p", {}, el("s", {}, longText(review.refused_text))) : null,
      el("div", { class: "review" }, el("p", {}, "It is no correction: ", longText(review.refused_correction))));
  }
  return review.correction === null ? null : version("Correction", "correction", el("p", { class: "said" }, longText(review.correction)));
}

/** What a review says. */
export function reviewBox(review) {
  return el("div", { class: "review" },
    el("p", {}, reviewBadge(review), review.penalty ? el("span", { class: "penalty" }, `penalty ${compact(review.penalty).replace("-", "−")}`) : null,
      el("span", { class: "nr" }, SOURCES[review.source] ?? "")),
    review.error ? el("p", { class: "wrong" }, longText(review.error)) : null,
    review.critique ? el("p", { class: "critique" }, longText(review.critique)) : null,
    review.raw ? el("details", { class: "raw" }, el("summary", {}, "The supervisor's whole answer"), el("pre", {}, longText(review.raw))) : null);
}

/** The review of a message that has nothing beside it, folded; null if the badge says all. */
export function foldedReview(review) {
  if (!review || !(review.error || review.critique || review.raw)) return null;
  return el("details", { class: "folded-review" }, el("summary", {}, "Review"), reviewBox(review));
}
