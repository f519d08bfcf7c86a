"""What is computed of a micro-batch: token budgets in place of rows, and nothing that is not trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


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


@dataclass(frozen=True)
class Cut:
    """What is left of a micro-batch without the rows that nothing is trained on in, and without the columns that are
    padding in all others.

    Attributes:
        rows: the places of the rows that are left; at least one, because all ranks have to compute together.
        count: how many there were.
        left, right: how many columns were taken away on each side.
    """

    rows: Tensor
    count: int
    left: int
    right: int

    @classmethod
    def of(cls, attention_mask: Tensor, wanted: Tensor, columns: bool = True) -> "Cut":
        """The cut of a micro-batch. One column of the prompt and one of the completion stay.

        Args:
            attention_mask: of shape (rows, prompt + completion).
            wanted: the tokens that are trained on, of shape (rows, completion).
            columns: whether columns may be taken away.
        """
        (count, width), prompt = attention_mask.shape, attention_mask.size(1) - wanted.size(1)
        rows = wanted.any(dim=1).nonzero().flatten()
        rows = rows if len(rows) else torch.zeros(1, dtype=torch.long, device=wanted.device)
        if not columns:
            return cls(rows, count, 0, 0)
        used = attention_mask[rows].any(dim=0).nonzero().flatten()
        first, last = (used[0].item(), used[-1].item()) if len(used) else (0, width - 1)
        return cls(rows, count, min(first, prompt - 1), width - 1 - max(last, prompt))

    def apply(self, whole: Tensor) -> Tensor:
        """What is left of a tensor over prompt and completion."""
        return whole[self.rows, self.left : whole.size(1) - self.right]

    def apply_right(self, whole: Tensor) -> Tensor:
        """What is left of a tensor over the completion alone."""
        return whole[self.rows, : whole.size(1) - self.right]

    def undo_right(self, left: Tensor) -> Tensor:
        """A tensor over the completion at its full size again, with zeros."""
        whole = left.new_zeros(self.count, left.size(1) + self.right)
        return whole.index_copy(0, self.rows, pad(left, (0, self.right)))


def scoring_only(model: Callable, wanted: Tensor) -> Callable:
    """A model with TRL's fused head that gives a log-prob to some tokens only, and 0 to all others.

    Args:
        wanted: a mask of shape (rows, completion).
    """

    def score(**inputs: Any) -> Any:
        labels = inputs.pop("labels")
        start = labels.size(1) - wanted.size(1)
        kept = torch.cat([labels[:, :start], labels[:, start:].masked_fill(~wanted, -100)], dim=1)
        return model(labels=kept, **inputs)

    return score


def mask_of(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """A mask of shape (rows, longest row), with False behind a row's end."""
    mask = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.bool)
    for place, row in enumerate(rows):
        mask[place, : len(row)] = torch.tensor(row, dtype=torch.bool)
    return mask.to(device)
