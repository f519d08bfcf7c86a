"""Fills micro-batches by tokens instead of rows: rows of like length go together, so that little of them is padding."""

from collections.abc import Sequence


def pack_rows(prompts: Sequence[int], completions: Sequence[int], limit: int) -> list[list[int]]:
    """Divide rows into micro-batches of at most `limit` tokens, padding included; a row that alone is longer gets a
    micro-batch of its own. Longest rows first, each into the first micro-batch with room for it.

    Prompts are padded on the left and completions on the right, so a micro-batch is as wide as its longest prompt and
    its longest completion together.

    Args:
        prompts, completions: the lengths of each row's two parts, in tokens.

    Returns:
        The indices of the rows of each micro-batch: every row once, the same division for the same lengths.
    """
    order = sorted(range(len(prompts)), key=lambda row: (-prompts[row] - completions[row], row))
    packs: list[list[int]] = []
    widths: list[tuple[int, int]] = []
    for row in order:
        for place, (prompt, completion) in enumerate(widths):
            wider = max(prompt, prompts[row]), max(completion, completions[row])
            if (len(packs[place]) + 1) * sum(wider) <= limit:
                packs[place].append(row)
                widths[place] = wider
                break
        else:
            packs.append([row])
            widths.append((prompts[row], completions[row]))
    return packs


def split_to(packs: Sequence[list[int]], count: int) -> list[list[int]]:
    """The same rows in exactly `count` micro-batches: those with the most rows are halved. All ranks need equally many,
    because they compute together. `count` is at least the number of packs, and at most that of rows."""
    packs = [list(pack) for pack in packs]
    while len(packs) < count:
        fullest = max(packs, key=len)
        half = len(fullest) // 2
        packs.append(fullest[half:])
        del fullest[half:]
    return packs
