"""The policy's log-probs of the tokens that are trained on, and nothing that is not needed for them: the language
model's head runs on these tokens alone, in tiles, inside the wrapped model's forward pass.

Shapes: B is the number of samples of a micro-batch, P its longest prompt and T its longest completion in tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from classroom_rl.trainer.batch import KEPT, NO_PADDING, TRIMMED, Batch, Padding


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
        hook_output: what `head_hook` gave; None without it.
    """

    logps_BT: Tensor
    entropy_BT: Tensor | None
    values: Tensor | None
    aux_loss: Tensor | None
    hook_output: Any = None


def log_probs(
    model: Any,
    micro: Batch,
    wanted_BT: Tensor,
    accelerator: Accelerator,
    padding: Padding = TRIMMED,
    aux_loss: bool = False,
    head_hook: Callable[[Any, Tensor], Any] | None = None,
) -> Scores:
    """One forward pass of a model that has TRL's fused head (`trl.trainer.utils.add_fused_lm_head`).

    Args:
        wanted_BT: the tokens that get a log-prob. Samples without any are left out of the pass.
        padding: what becomes of the columns that are padding (`padding_of`).
        head_hook: called inside the pass with the model's head and the hidden states before the N wanted tokens, row by
            row, of shape (N, width); the model is one that shares its head (`distributions.share_head`).
    """
    ids = torch.cat([micro.prompt_ids_BP, micro.completion_ids_BT], dim=1)
    attention = torch.cat([micro.prompt_mask_BP, micro.completion_mask_BT], dim=1)
    labels = ids.masked_fill(~pad(wanted_BT, (micro.prompt_ids_BP.size(1), 0)), -100)
    layout: TrimmedRows | PackedRow
    if padding == NO_PADDING:
        layout = PackedRow.of(attention, wanted_BT)
    else:
        layout = TrimmedRows.of(attention, wanted_BT, columns=padding == TRIMMED)
    options: dict[str, Any] = {"output_router_logits": True} if aux_loss else {}
    if head_hook is not None:
        options["head_hook"] = head_hook
    with accelerator.autocast():
        output = model(**layout.inputs(ids, attention), labels=layout.apply(labels), fused_lm_head=True, **options)
    entropy, values, length = output.entropy, getattr(output, "state_values", None), wanted_BT.size(1)
    # The first token of a row has no prediction, so log-probs and entropies begin with the second one.
    return Scores(
        layout.undo(pad(output.log_probs, (1, 0)))[:, -length:],
        None if entropy is None else layout.undo(pad(entropy, (1, 0)))[:, -length:],
        None if values is None else layout.undo(values)[:, -length - 1 :],
        output.aux_loss if aux_loss else None,
        getattr(output, "hook_output", None),
    )


@torch.no_grad()
def log_probs_of_batch(
    model: Any, batch: Batch, divisions: Sequence[Sequence[int]], accelerator: Accelerator, padding: Padding
) -> Scores:
    """The log-probs of a whole batch, and a critic's values, without gradient and without dropout; all processes call
    this together.

    Args:
        divisions: the rows of each micro-batch.
    """
    logps_BT = torch.zeros_like(batch.sampling_logps_BT)
    values = None
    with without_dropout(model):
        for rows in divisions:
            micro = batch.take(rows)
            scores = log_probs(model, micro, micro.wanted_BT, accelerator, padding)
            if not rows:  # computed all the same: sharded weights are gathered together
                continue
            logps_BT[rows] = scores.logps_BT.to(logps_BT.dtype)
            if scores.values is not None:
                values = scores.values.new_zeros(len(logps_BT), scores.values.size(1)) if values is None else values
                values[rows] = scores.values
    return Scores(logps_BT, entropy_BT=None, values=values, aux_loss=None)


def padding_of(model: Any, padding_free: bool) -> Padding:
    """What becomes of the padding of a model's micro-batches.

    Args:
        padding_free: `train.padding_free`, with which the model was loaded.
    """
    return NO_PADDING if padding_free else TRIMMED if can_trim_padding(model) else KEPT


def can_trim_padding(model: Any) -> bool:
    """Whether a sample's log-probs are the same in a batch of another width. They are not where the frequencies of
    rotary positions depend on the longest position."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(parameters for parameters in rope.values() if isinstance(parameters, dict))]
    return not any(parameters.get("rope_type") in ("dynamic", "longrope") for parameters in kinds)


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether the same forward pass gives another result the next time."""
    has_dropout_module = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    return has_dropout_module or getattr(model.config.get_text_config(), "attention_dropout", 0.0) > 0


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model computes what the engine computes, which sampled without dropout."""
    active = [module for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.training]
    for module in active:
        module.eval()
    try:
        yield
    finally:
        for module in active:
            module.train()


@dataclass(frozen=True)
class TrimmedRows:
    """What is left of a micro-batch without the samples that nothing is trained on in, and without the columns that are
    padding in all others.

    Attributes:
        rows: the indices of the samples that are left.
        count: how many there were.
        left, right: how many columns were taken away on each side.
    """

    rows: Tensor
    count: int
    left: int
    right: int

    @classmethod
    def of(cls, attention_mask: Tensor, wanted_BT: Tensor, columns: bool = True) -> "TrimmedRows":
        """What is left of a micro-batch. One column of the prompt and one of the completion stay.

        Args:
            attention_mask: of shape (B, P + T).
            columns: whether columns may be taken away.
        """
        (count, width), prompt = attention_mask.shape, attention_mask.size(1) - wanted_BT.size(1)
        rows = _rows_with(wanted_BT)
        if not columns:
            return cls(rows, count, 0, 0)
        used = attention_mask[rows].any(dim=0).nonzero().flatten()
        first, last = (used[0].item(), used[-1].item()) if len(used) else (0, width - 1)
        return cls(rows, count, min(first, prompt - 1), width - 1 - max(last, prompt))

    def inputs(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """What the model is given of the ids and the attention mask of a micro-batch."""
        return {"input_ids": self.apply(ids), "attention_mask": self.apply(attention_mask)}

    def apply(self, whole: Tensor) -> Tensor:
        """What is left of a tensor over prompt and completion."""
        return whole[self.rows, self.left : whole.size(1) - self.right]

    def undo(self, left: Tensor) -> Tensor:
        """A tensor over prompt and completion at its full size again, with zeros."""
        widened = pad(left, (self.left, self.right))
        return left.new_zeros(self.count, widened.size(1)).index_copy(0, self.rows, widened)


@dataclass(frozen=True)
class PackedRow:
    """A micro-batch without padding, in one row: its samples one after the other, without those that nothing is trained
    on in. S is the number of their tokens.

    Attributes:
        mask: the tokens of the micro-batch that are in the row, of shape (B, P + T).
    """

    mask: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, wanted_BT: Tensor) -> "PackedRow":
        """The row of a micro-batch.

        Args:
            attention_mask: of shape (B, P + T).
        """
        mask, rows = torch.zeros_like(attention_mask, dtype=torch.bool), _rows_with(wanted_BT)
        mask[rows] = attention_mask[rows].bool()
        return cls(mask)

    def inputs(self, ids: Tensor, _attention_mask: Tensor) -> dict[str, Tensor | int]:
        """What the model is given: positions begin anew with every sample, and attention ends there, which flash
        attention and `padding_free.attention_of_each_sequence` are told by transformers' names."""
        lengths = self.mask.sum(dim=1)
        lengths = lengths[lengths > 0]
        ends, longest = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())
        return {
            "input_ids": self.apply(ids),
            "position_ids": self.apply(self.mask.cumsum(dim=1) - 1),
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def apply(self, whole: Tensor) -> Tensor:
        """The row, of shape (1, S), of a tensor over prompt and completion."""
        return whole[self.mask].unsqueeze(0)

    def undo(self, row: Tensor) -> Tensor:
        """A tensor over prompt and completion, with zeros, of one over the row."""
        return row.new_zeros(self.mask.shape).masked_scatter(self.mask, row)


def _rows_with(wanted_BT: Tensor) -> Tensor:
    """The indices of the samples with a wanted token; at least one, because all processes have to compute together."""
    rows = wanted_BT.any(dim=1).nonzero().flatten()
    return rows if len(rows) else torch.zeros(1, dtype=torch.long, device=wanted_BT.device)
