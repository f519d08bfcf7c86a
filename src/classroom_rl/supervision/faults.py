"""Faults of a message, their ranking, and the detection of faults that do not depend on the lesson."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.rollout.reviews import MessageToReview, Review
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.thoughts import visible_text

RANKING = (
    *("off_topic", "leak", "ends_early"),
    *("ignores_error", "false_correction", "wrong_maths", "language"),
    *("format", "task", "length", "repetition"),
)
"""The categories of faults, worst first, in the order of their default penalties."""

_SPECIAL = re.compile(
    r"<\||\|>|</?think>|</?s>|<(?:bos|eos|pad|unk)>|\[/?INST\]|</?tool_call>|<(?:start|end)_of_turn>", re.IGNORECASE
)
_SPEAKER = re.compile(r"(?:^|\n)[^\S\n]*(?:student|teacher|tutor|user|assistant|system)\s*:", re.IGNORECASE)
_TO_SUPERVISOR = re.compile(
    r"(?:^|\n|[.!?]\s)\s*(?:dear |note to (?:the )?|to (?:the )?|hello,? |hi,? )?"
    r"(?:supervisor|reviewer|evaluator|grader|judge)\b\s*[:,!]|"
    r"\bthis (?:message|turn) (?:is|should be (?:rated|counted|marked)(?: as)?|counts as) (?:\w+ )?valid\b|"
    r"\"(?:valid|category|critique|decision|\w+_score|\w+_reasoning)\"\s*:|"
    r"\b(?:ignore|disregard|forget) (?:all |any |your |previous |prior )+(?:\w+ )?"
    r"(?:rules|instructions|criteria|prompts?)\b",
    re.IGNORECASE,
)
FEWEST_ENGLISH_WORDS = 0.08
"""Minimum share of English function words in a long English text. In English prose the share is about 0.4."""

LONG_TEXT = 30
"""In words. The language of a shorter text is not decided: a line of a role-play may be in any language."""

_ENGLISH = frozenset(
    "a an the i you he she it we they me my your his her to of in on at for with from and or but not is are was were "
    "do does did have has had what which how when where who that this there can could would will if as be so".split()
)
_MOST_OF_ANOTHER_SCRIPT = 0.3
_JAPANESE_SCRIPTS = frozenset(
    {"HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "CJK", "IDEOGRAPHIC", "FULLWIDTH", "HALFWIDTH"}
)
"""Scripts that occur together in Japanese text."""


@dataclass(frozen=True)
class Fault:
    """One fault of a message: a category of `RANKING`, and a critique in a sentence for people to read."""

    category: str
    critique: str


def worst(faults: Sequence[Fault]) -> Fault:
    """The fault whose category comes first in `RANKING`; the first one if several share this category."""
    return min(faults, key=lambda fault: RANKING.index(fault.category))


def review_of(faults: Sequence[Fault], correction: str | None = None) -> Review:
    """The rules' review of a message with these faults, of which the worst counts. A message without faults is valid
    and has no correction."""
    if not faults:
        return Review(valid=True)
    fault = worst(faults)
    return Review(valid=False, category=fault.category, critique=fault.critique, correction=correction)


def says(text: str) -> str:
    """The part of a message that the student sees: without thoughts and without `END_OF_CONVERSATION`."""
    return visible_text(text).replace(END_OF_CONVERSATION, "").strip()


def ends(text: str) -> bool:
    """Whether the message closes the conversation."""
    return END_OF_CONVERSATION in visible_text(text)


def special_token(text: str) -> str:
    """The first special token or thinking tag in a text; "" if there is none."""
    match = _SPECIAL.search(text)
    return match[0] if match else ""


def faults_of_form(request: MessageToReview) -> list[Fault]:
    """The faults that do not depend on the lesson: the message is truncated or empty, contains a special token or
    another speaker's turn, or addresses the supervisor."""
    visible = visible_text(request.message)
    faults = []
    if request.cut:
        faults.append(Fault("length", "The message is cut off at its token limit."))
    if not says(request.message):
        faults.append(Fault("format", "The message says nothing."))
    if token := special_token(visible):
        faults.append(Fault("format", f"The message writes {token!r}, which belongs to no message."))
    if _SPEAKER.search(visible):
        faults.append(Fault("format", "The message writes a speaker's name and then that speaker's part."))
    if match := _TO_SUPERVISOR.search(visible):
        quoted = match[0].strip()[:60]
        faults.append(Fault("off_topic", f"The message speaks to whoever reviews it, not to the student: “{quoted}”."))
    return faults


def repeats_earlier(request: MessageToReview) -> bool:
    """Whether the teacher has already sent the same message, ignoring case and punctuation."""
    message = normal(says(request.message))
    earlier_messages = (turn["content"] for turn in request.conversation if turn["role"] == "teacher")
    return bool(message) and any(normal(says(text)) == message for text in earlier_messages)


def is_in_another_script(text: str, lesson: str) -> bool:
    """Whether more than 30 % of the text's letters belong to scripts other than those of the lesson, Latin, and (for
    formulas) Greek."""
    scripts = [_script(letter) for letter in text if letter.isalpha()]
    allowed = {_script(letter) for letter in lesson if letter.isalpha()} | {"LATIN", "GREEK", "MATHEMATICAL", "MICRO"}
    if allowed & {"HIRAGANA", "KATAKANA"}:
        allowed |= _JAPANESE_SCRIPTS
    foreign = sum(script not in allowed for script in scripts)
    return bool(scripts) and foreign / len(scripts) > _MOST_OF_ANOTHER_SCRIPT


def is_not_english(text: str) -> bool:
    """Whether a text has at least `LONG_TEXT` words and is certainly not English."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return len(words) >= LONG_TEXT and sum(word in _ENGLISH for word in words) / len(words) < FEWEST_ENGLISH_WORDS


def _script(letter: str) -> str:
    """The first word of a letter's Unicode name, such as LATIN or CYRILLIC."""
    return unicodedata.name(letter, "").split(" ")[0]
