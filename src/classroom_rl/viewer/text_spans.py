"""Splits messages into spoken and thought parts, and the teacher's tokens into pieces of text with their masks."""

import re
from collections.abc import Callable, Sequence

SAID, THOUGHT = "said", "thought"
_CLOSED = re.compile(r"(<think>.*?</think>)", re.DOTALL)
_MOST_IDS_OF_A_CHARACTER = 8


def split_thoughts(text: str) -> list[tuple[str, str]]:
    """Split a message into (kind, text) parts, kind "said" or "thought", by the rules of
    `classroom_rl.rollout.thoughts.visible_text`. Thoughts include their tags. The parts add up to the whole text."""
    parts = [(THOUGHT if i % 2 else SAID, piece) for i, piece in enumerate(_CLOSED.split(text)) if piece]
    parts = _hide(parts, lambda piece: piece.find("<think>"), hides_rest=True)
    parts = _hide(parts, lambda piece: end if (end := piece.rfind("</think>")) < 0 else end + 8, hides_rest=False)
    merged: list[tuple[str, str]] = []
    for kind, piece in parts:
        if merged and merged[-1][0] == kind:
            merged[-1] = (kind, merged[-1][1] + piece)
        else:
            merged.append((kind, piece))
    return merged


def _hide(parts: list[tuple[str, str]], find: Callable[[str], int], hides_rest: bool) -> list[tuple[str, str]]:
    """Mark as thought the text after the first cut (`hides_rest`), or the text before the last cut."""
    cuts = [(i, cut) for i, (kind, piece) in enumerate(parts) if kind == SAID and (cut := find(piece)) >= 0]
    if not cuts:
        return parts
    i, cut = cuts[0] if hides_rest else cuts[-1]
    before, after = parts[i][1][:cut], parts[i][1][cut:]
    if hides_rest:
        changed = [*parts[:i], (SAID, before), (THOUGHT, after), *((THOUGHT, piece) for _, piece in parts[i + 1 :])]
    else:
        changed = [*((THOUGHT, piece) for _, piece in parts[:i]), (THOUGHT, before), (SAID, after), *parts[i + 1 :]]
    return [(kind, piece) for kind, piece in changed if piece]


def pieces_of(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], mask: Sequence[int]
) -> list[tuple[str, int, int]]:
    """(text, mask, number of tokens) for each token. Tokens with equal masks that form one character share an entry."""
    pieces = []
    start = 0
    while start < len(ids):
        end = start + 1
        while (
            decode(ids[start:end]).endswith("\ufffd")
            and end < len(ids)
            and mask[end] == mask[start]
            and end - start < _MOST_IDS_OF_A_CHARACTER
        ):
            end += 1
        pieces.append((decode(ids[start:end]), mask[start], end - start))
        start = end
    return pieces
