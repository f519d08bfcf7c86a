"""What is wrong with a message: faults, which of them counts, and the faults that need no lesson to be seen."""

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
"""The categories, worst first, in the order of their default penalties."""

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
"""Share of English function words below which a long text is not English. In English prose it is about 0.4."""

LONG_TEXT = 30
"""In words; whether a shorter text is English is not decided. A line of a role-play is shorter."""

_ENGLISH = frozenset(
    "a an the i you he she it we they me my your his her to of in on at for with from and or but not is are was were "
    "do does did have has had what which how when where who that this there can could would will if as be so".split()
)
_MOST_OF_ANOTHER_SCRIPT = 0.3
_TOGETHER = frozenset({"HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "CJK", "IDEOGRAPHIC", "FULLWIDTH", "HALFWIDTH"})
"""Scripts that Japanese mixes."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a message: a category of `RANKING`, and a sentence for people to read."""

    category: str
    critique: str


def worst(faults: Sequence[Fault]) -> Fault:
    """The fault whose category comes first in `RANKING`; of several in one category the first."""
    return min(faults, key=lambda fault: RANKING.index(fault.category))


def review_of(faults: Sequence[Fault], correction: str | None = None) -> Review:
    """The rules' review of a message with these faults. A message without a fault is valid and has no correction."""
    if not faults:
        return Review(valid=True)
    found = worst(faults)
    return Review(valid=False, category=found.category, critique=found.critique, correction=correction)


def says(text: str) -> str:
    """The part of a message that the student reads: without thoughts and without `END_OF_CONVERSATION`."""
    return visible_text(text).replace(END_OF_CONVERSATION, "").strip()


def ends(text: str) -> bool:
    """Whether the message closes the conversation."""
    return END_OF_CONVERSATION in visible_text(text)


def special_token(text: str) -> str:
    """The first special token or thinking tag in a text; "" if there is none."""
    found = _SPECIAL.search(text)
    return found[0] if found else ""


def faults_of_form(about: MessageToReview) -> list[Fault]:
    """The faults that a message has in any lesson: it is cut, empty, writes another speaker's part, or speaks to
    whoever reviews it."""
    said = visible_text(about.message)
    faults = []
    if about.cut:
        faults.append(Fault("length", "The message is cut off at its token limit."))
    if not says(about.message):
        faults.append(Fault("format", "The message says nothing."))
    if token := special_token(said):
        faults.append(Fault("format", f"The message writes {token!r}, which belongs to no message."))
    if _SPEAKER.search(said):
        faults.append(Fault("format", "The message writes a speaker's name and then that speaker's part."))
    if found := _TO_SUPERVISOR.search(said):
        quoted = found[0].strip()[:60]
        faults.append(Fault("off_topic", f"The message speaks to whoever reviews it, not to the student: “{quoted}”."))
    return faults


def repeats_earlier(about: MessageToReview) -> bool:
    """Whether the teacher has already sent this very message; capitals and punctuation do not count."""
    said = normal(says(about.message))
    earlier = (each["content"] for each in about.conversation if each["role"] == "teacher")
    return bool(said) and any(normal(says(each)) == said for each in earlier)


def is_in_another_script(text: str, lesson: str) -> bool:
    """Whether more than 30 % of the text's letters are of scripts that occur neither in the lesson nor in English nor,
    for formulas, in Greek."""
    scripts = [_script(each) for each in text if each.isalpha()]
    known = {_script(each) for each in lesson if each.isalpha()} | {"LATIN", "GREEK", "MATHEMATICAL", "MICRO"}
    if known & {"HIRAGANA", "KATAKANA"}:
        known |= _TOGETHER
    strange = sum(script not in known for script in scripts)
    return bool(scripts) and strange / len(scripts) > _MOST_OF_ANOTHER_SCRIPT


def is_not_english(text: str) -> bool:
    """Whether a text of at least `LONG_TEXT` words is surely not English."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return len(words) >= LONG_TEXT and sum(each in _ENGLISH for each in words) / len(words) < FEWEST_ENGLISH_WORDS


def _script(letter: str) -> str:
    """The first word of a letter's Unicode name, such as LATIN or CYRILLIC."""
    return unicodedata.name(letter, "").split(" ")[0]
