"""Checks a correction before anybody hears it or trains on it: it has to pass the rules that apply to its problem."""

from dataclasses import replace

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.rollout.reviews import MessageToReview, Review
from classroom_rl.rollout.text import has_surrogates
from classroom_rl.supervision.faults import special_token
from classroom_rl.supervision.rules_supervisor import Rules, review_by_rules

MOST_CHARACTERS = 1200
"""A longer correction is refused. A good message of a tutor has at most 80 words, about 500 characters."""


def check_correction(correction: str, about: MessageToReview, rules: Rules = review_by_rules) -> str:
    """Why a correction of the message is refused; "" if it is accepted.

    The rules see it in place of the message, with the same facts. If no rules apply to the problem, only its form is
    checked.

    Args:
        rules: the environment's rules.
    """
    if not correction.replace(END_OF_CONVERSATION, "").strip():
        return "it is empty"
    if len(correction) > MOST_CHARACTERS:
        return f"it has {len(correction)} characters; at most {MOST_CHARACTERS} are accepted"
    if " ".join(correction.split()) == " ".join(about.message.split()):
        return "it is the message itself"
    if token := special_token(correction):
        return f"it holds {token!r}, which belongs to no message"
    if has_surrogates(correction) or "\x00" in correction:
        return "it holds characters that cannot be stored"
    if END_OF_CONVERSATION in correction.strip().removesuffix(END_OF_CONVERSATION):
        return f"{END_OF_CONVERSATION} is not at its end"
    found = rules(replace(about, message=correction, cut=False))
    return f"{found.category}: {found.critique}" if found.valid is False else ""


def checked(review: Review, about: MessageToReview, rules: Rules = review_by_rules) -> Review:
    """The review, without its correction if that is refused; then it says why. A review of a valid message, or without
    a verdict, has no correction."""
    if review.correction is None:
        return review
    if review.valid is not False:
        return replace(review, correction=None)
    reason = check_correction(review.correction, about, rules)
    return replace(review, correction=None, refused_correction=reason) if reason else review
