"""What is computed of a micro-batch: rows and columns that nothing is trained on are left out, and only tokens that are
trained on get a log-prob."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


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
