"""Thoughts in a message: text between `<think>` and `</think>`, which only the model itself may see."""

import re
from collections.abc import Callable, Iterable
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


def visible_text(text: str) -> str:
    """A message without its thoughts, as the other models see it. An unclosed `<think>` hides the rest of the message;
    a `</think>` whose opening tag is in the prompt hides everything before it."""
    text = _CLOSED_THOUGHT.sub("", text)
    text = text.split("<think>", 1)[0]
    return text.rsplit("</think>", 1)[-1].strip()


def thoughts_in(text: str) -> list[str]:
    """The texts of a message's closed thoughts, without the tags."""
    return [_TAG.sub("", thought) for thought in _CLOSED_THOUGHT.findall(text)]


def split_message(text: str, opened: bool = False) -> SplitMessage:
    """Split a message by the rules of `visible_text`.

    Args:
        opened: whether the prompt ended with `<think>`, so that the message begins as a thought. Without it, a
            `</think>` that nothing opened shows that the prompt did.
    """
    whole = f"<think>{text}" if opened else text
    outside = _CLOSED_THOUGHT.sub("", whole)
    content, cut, unclosed = outside.partition("<think>")
    thought_before, stray_close, _ = content.rpartition("</think>")
    pieces = [thought_before] if stray_close else []
    pieces += _CLOSED_THOUGHT.findall(whole)
    pieces += [unclosed] if cut else []
    thoughts = [_TAG.sub("", piece).strip() for piece in pieces]
    if cut:
        state = CUT
    elif opened or stray_close:
        state = OPENED
    else:
        state = CLOSED if pieces else ABSENT
    return SplitMessage(visible_text(whole), "\n".join(thoughts) if pieces else None, state)


def visible_messages(turns: "Iterable[Turn]") -> list[dict[str, str]]:
    """The messages of a conversation without thoughts, each as {"role", "content"}."""
    return [{"role": turn.role, "content": visible_text(turn.text)} for turn in turns]


SAID, THOUGHT = "said", "thought"


def split_thoughts(text: str) -> list[tuple[str, str]]:
    """Split a message into (kind, text) parts, kind "said" or "thought", by the rules of `visible_text`. Thoughts
    include their tags. The parts add up to the whole text."""
    # the pattern has a group, so `split` returns text and thoughts in turn
    parts = [
        (THOUGHT if index % 2 else SAID, piece) for index, piece in enumerate(_CLOSED_THOUGHT.split(text)) if piece
    ]
    # a thought may also lack its end (cut off) or its beginning (opened by the prompt)
    parts = _mark_thought(parts, lambda piece: piece.find("<think>"), hides_rest=True)
    parts = _mark_thought(
        parts, lambda piece: end if (end := piece.rfind("</think>")) < 0 else end + 8, hides_rest=False
    )
    merged: list[tuple[str, str]] = []
    for kind, piece in parts:
        if merged and merged[-1][0] == kind:
            merged[-1] = (kind, merged[-1][1] + piece)
        else:
            merged.append((kind, piece))
    return merged


def _mark_thought(parts: list[tuple[str, str]], find: Callable[[str], int], hides_rest: bool) -> list[tuple[str, str]]:
    """Mark as thought the text after the first cut (with `hides_rest`), or the text before the last cut. `find` returns
    the position of a cut in a piece, or a negative number."""
    cuts = [(index, cut) for index, (kind, piece) in enumerate(parts) if kind == SAID and (cut := find(piece)) >= 0]
    if not cuts:
        return parts
    index, cut = cuts[0] if hides_rest else cuts[-1]
    before, after = parts[index][1][:cut], parts[index][1][cut:]
    if hides_rest:
        changed = [
            *parts[:index],
            (SAID, before),
            (THOUGHT, after),
            *((THOUGHT, piece) for _, piece in parts[index + 1 :]),
        ]
    else:
        changed = [
            *((THOUGHT, piece) for _, piece in parts[:index]),
            (THOUGHT, before),
            (SAID, after),
            *parts[index + 1 :],
        ]
    return [(kind, piece) for kind, piece in changed if piece]
