"""Thoughts in a message: text between `<think>` and `</think>`, which only the model itself may see."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from classroom_rl.rollout.tokens import Turn

_CLOSED_THOUGHT = re.compile(r"(<think>.*?</think>)", re.DOTALL)
_TAG = re.compile("</?think>")
ABSENT, CLOSED, OPENED, CUT = "absent", "closed", "opened", "cut"
"""The states of a message's thought. `absent`: there is no thought. `closed`: the model opened and closed it. `opened`:
the prompt opened it, as some chat templates do, and the model closed it. `cut`: it was never closed."""


@dataclass(frozen=True)
class SplitMessage:
    """A message, split into its content and its thoughts.

    Attributes:
        content: the text outside of thoughts; empty if the message ended inside its thought.
        thought: the thoughts, without tags, joined by newlines; None if there are none.
        state: one of `ABSENT`, `CLOSED`, `OPENED` and `CUT`. With several thoughts, `CUT` if one was never closed.
    """

    content: str
    thought: str | None
    state: str


Range = tuple[int, int]
"""[start, end) of some characters of a text."""


def visible_ranges(text: str) -> list[Range]:
    """Where the parts of a message are that are no thought, in order. An unclosed `<think>` hides the rest of the
    message; a `</think>` whose opening tag is in the prompt hides everything before it."""
    ranges: list[Range] = []
    end = 0
    while (start := text.find("<think>", end)) >= 0 and (closed := text.find("</think>", start)) >= 0:
        ranges.append((end, start))
        end = closed + len("</think>")
    ranges.append((end, len(text)))
    rest = "".join(text[start:end] for start, end in ranges)  # joined pieces may form new tags
    unclosed = rest.find("<think>")
    stop = len(rest) if unclosed < 0 else unclosed
    closed = rest.rfind("</think>", 0, stop)
    return ranges_in_text(ranges, 0 if closed < 0 else closed + len("</think>"), stop)


def ranges_in_text(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    """Map the range [start, end) of the joined ranges back to ranges of the text."""
    mapped, offset = [], 0
    for first, last in ranges:
        low, high = max(start - offset, 0), min(end - offset, last - first)
        if low < high:
            mapped.append((first + low, first + high))
        offset += last - first
    return mapped


def visible_text(text: str) -> str:
    """A message without its thoughts, as the other models see it."""
    return "".join(text[start:end] for start, end in visible_ranges(text)).strip()


def thoughts_in(text: str) -> list[str]:
    """The texts of a message's closed thoughts, without the tags."""
    return [_TAG.sub("", thought) for thought in _CLOSED_THOUGHT.findall(text)]


def split_message(text: str, opened: bool = False) -> SplitMessage:
    """Split a message by the rules of `visible_text`. `opened` says whether the prompt ended with `<think>`, so that
    the message begins as a thought. Without it, a `</think>` that nothing opened shows that the prompt did."""
    full_text = f"<think>{text}" if opened else text
    without_thoughts = _CLOSED_THOUGHT.sub("", full_text)
    content, open_tag, unclosed = without_thoughts.partition("<think>")
    thought_before, stray_close, _ = content.rpartition("</think>")
    pieces = [thought_before] if stray_close else []
    pieces += _CLOSED_THOUGHT.findall(full_text)
    pieces += [unclosed] if open_tag else []
    thoughts = [_TAG.sub("", piece).strip() for piece in pieces]
    if open_tag:
        state = CUT
    elif opened or stray_close:
        state = OPENED
    else:
        state = CLOSED if pieces else ABSENT
    return SplitMessage(visible_text(full_text), "\n".join(thoughts) if pieces else None, state)


def visible_messages(turns: "Iterable[Turn]") -> list[dict[str, str]]:
    """The messages of a conversation without thoughts, each as {"role", "content"}."""
    return [{"role": turn.role, "content": visible_text(turn.text)} for turn in turns]


SAID, THOUGHT = "said", "thought"


def split_thoughts(text: str) -> list[tuple[str, str]]:
    """Split a message into (kind, text) parts, kind "said" or "thought", by the rules of `visible_text`. Thoughts
    include their tags. The parts add up to the whole text."""
    parts, position = [], 0
    for start, end in visible_ranges(text):
        parts += [(THOUGHT, text[position:start]), (SAID, text[start:end])]
        position = end
    return [(kind, piece) for kind, piece in [*parts, (THOUGHT, text[position:])] if piece]
