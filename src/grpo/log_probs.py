"""How the log-probs of a micro-batch are computed: its rows are cut to the longest of them, only tokens that are trained
on get one, and on CPUs the vocabulary is taken in tiles that stay in the processor's cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

_TILE = (1024, 2048)
"""Tokens and words of the vocabulary in one product: 8 MB of float32."""


def use_small_tiles() -> None:
    """Have TRL's log-probs on a CPU take small tiles, and only tokens that have a label. TRL takes 4,096 × 32,768 at a
    time, half a gigabyte that is read and written some ten times, and all tokens: it spares other devices than GPUs
    shapes that change, which would cost them a compilation."""
    chunked_logprob.TOKEN_CHUNK_SIZE, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = _TILE
    trl_utils._use_triton = lambda device: True  # in this module it only decides whether tokens without label are left


@dataclass(frozen=True)
class Cut:
    """What is left of a micro-batch without the columns that are padding in all of its rows.

    Attributes:
        left, right: how many columns were taken away on each side.
    """

    left: int
    right: int

    @classmethod
    def of(cls, attention_mask: Tensor, completion_length: int) -> "Cut":
        """The cut of a micro-batch, from its mask of shape (rows, prompt + completion). One column of the prompt and
        one of the completion stay."""
        width = attention_mask.size(1)
        used = attention_mask.any(dim=0).nonzero().flatten()
        first, last = (used[0].item(), used[-1].item()) if len(used) else (0, width - 1)
        prompt = width - completion_length
        return cls(min(first, prompt - 1), width - 1 - max(last, prompt))

    def apply(self, columns: Tensor) -> Tensor:
        """The columns that are left, of a tensor over prompt and completion."""
        return columns[:, self.left : columns.size(1) - self.right]

    def apply_right(self, columns: Tensor) -> Tensor:
        """The columns that are left, of a tensor over the completion alone."""
        return columns[:, : columns.size(1) - self.right]

    def undo_right(self, columns: Tensor) -> Tensor:
        """A tensor over the completion at its full width again, with zeros."""
        return pad(columns, (0, self.right))


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
