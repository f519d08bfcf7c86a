"""The policy's log-probs of the tokens that are trained on, and nothing that is not needed for them: the language
model's head runs on these tokens alone, in tiles, inside the wrapped model's forward pass.

Shapes: B is the number of samples of a micro-batch, P its longest prompt and T its longest completion in tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from classroom_rl.trainer.batch import Batch


@dataclass(frozen=True)
class Scores:
    """What one forward pass gives.

    Attributes:
        logps_BT: the log-prob of every wanted token, 0 for all others. Logits are divided by the sampling temperature.
        entropy_BT: the entropy of the distribution that the token was drawn from, in nats; None if the model has no
            such output.
        values: with a critic, the value of the state before each completion token and of the one after the last, of
            shape (B, T + 1).
        aux_loss: the loss that balances experts; None if it is not wanted.
    """

    logps_BT: Tensor
    entropy_BT: Tensor | None
    values: Tensor | None
    aux_loss: Tensor | None


def log_probs(
    model: Any,
    micro: Batch,
    wanted_BT: Tensor,
    accelerator: Accelerator,
    trims_padding: bool = True,
    aux_loss: bool = False,
) -> Scores:
    """One forward pass of a model that has TRL's fused head (`trl.trainer.utils.add_fused_lm_head`).

    Args:
        wanted_BT: the tokens that get a log-prob. Samples without any are left out of the pass.
        trims_padding: whether columns that are padding are left out, too (`can_trim_padding`).
    """
    ids = torch.cat([micro.prompt_ids_BP, micro.completion_ids_BT], dim=1)
    attention = torch.cat([micro.prompt_mask_BP, micro.completion_mask_BT], dim=1)
    cut = Cut.of(attention, wanted_BT, trims_padding)
    wanted_BT = cut.apply_right(wanted_BT)
    width = wanted_BT.size(1)
    inputs = cut.apply(ids)
    labels = torch.full_like(inputs, -100)
    labels[:, -width:] = inputs[:, -width:].masked_fill(~wanted_BT, -100)
    more = {"output_router_logits": True} if aux_loss else {}
    with accelerator.autocast():
        output = model(input_ids=inputs, attention_mask=cut.apply(attention), labels=labels, fused_lm_head=True, **more)
    entropy, values = output.entropy, getattr(output, "state_values", None)
    return Scores(
        cut.undo_right(output.log_probs[:, -width:]),
        None if entropy is None else cut.undo_right(entropy[:, -width:]),
        None if values is None else cut.undo_right(values[:, -width - 1 :]),
        output.aux_loss if aux_loss else None,
    )


def can_trim_padding(model: Any) -> bool:
    """Whether a sample's log-probs are the same in a batch of another width. They are not where the frequencies of
    rotary positions depend on the longest position."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return not any(each.get("rope_type") in ("dynamic", "longrope") for each in kinds)


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether the same forward pass gives another result the next time."""
    modules = any(isinstance(each, torch.nn.Dropout) and each.p > 0 for each in model.modules())
    return modules or getattr(model.config.get_text_config(), "attention_dropout", 0.0) > 0


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model computes what the engine computes, which sampled without dropout."""
    active = [each for each in model.modules() if isinstance(each, torch.nn.Dropout) and each.training]
    for each in active:
        each.eval()
    try:
        yield
    finally:
        for each in active:
            each.train()


@dataclass(frozen=True)
class Cut:
    """What is left of a micro-batch without the samples that nothing is trained on in, and without the columns that are
    padding in all others.

    Attributes:
        rows: the places of the samples that are left; at least one, because all processes have to compute together.
        count: how many there were.
        left, right: how many columns were taken away on each side.
    """

    rows: Tensor
    count: int
    left: int
    right: int

    @classmethod
    def of(cls, attention_mask: Tensor, wanted_BT: Tensor, columns: bool = True) -> "Cut":
        """The cut of a micro-batch. One column of the prompt and one of the completion stay.

        Args:
            attention_mask: of shape (B, P + T).
            columns: whether columns may be taken away.
        """
        (count, width), prompt = attention_mask.shape, attention_mask.size(1) - wanted_BT.size(1)
        rows = wanted_BT.any(dim=1).nonzero().flatten()
        rows = rows if len(rows) else torch.zeros(1, dtype=torch.long, device=wanted_BT.device)
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
