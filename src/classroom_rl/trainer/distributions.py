"""The policy's next-token distributions beside those of a strong tutor: how far they are from each other, computed by
the heads of both inside the policy's forward pass, in tiles, so that no one holds the logits of a micro-batch.

Over the whole vocabulary this is TRL's kernel, which reads the hidden states and the heads of both models. Over the
strong tutor's K most likely tokens, all others are one more outcome, with the probability that they have together. That
divergence is never above the one over the whole vocabulary: how the others share what they have is not compared.

Shapes: N is the number of wanted tokens of a micro-batch, H a model's width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction, _compute_dtype, _project
from trl.kernels.chunked_logprob import _addmm_fp32, _torch_transform
from trl.trainer.utils import maybe_gather_lm_head_ctx

from classroom_rl.config.values import FORWARD, JSD, REVERSE, Divergence
from classroom_rl.trainer.critic import ScoredOutput
from classroom_rl.trainer.losses import divergence
from classroom_rl.trainer.sharded_save import whole

_TILE = 2**26
"""The logits of one tile: 256 MiB of float32."""
_TRLS_BETA = {FORWARD: 0.0, JSD: 0.5, REVERSE: 1.0}


@dataclass(frozen=True)
class Head:
    """The output head of a language model, and what becomes of its logits: they are scaled, capped, and divided by the
    sampling temperature."""

    linear: Any
    logit_scale: float
    final_logit_softcapping: float | None
    temperature: float

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, those that FSDP2 split gathered: all processes call this together."""
        return whole(self.linear.weight), None if self.linear.bias is None else whole(self.linear.bias)

    def logits(self, product: Tensor) -> Tensor:
        """The logits that are sampled from, of what the linear layer gave."""
        cap = self.final_logit_softcapping
        return _torch_transform(product, self.logit_scale, cap, 1 / self.temperature, cap is not None)


def share_head(model: PreTrainedModel) -> None:
    """Let others use the head of a model that has TRL's fused head inside its forward pass, where ZeRO and FSDP have
    their weights: what `model(…, beside=function)` gives has `function(head, hidden_NH)` in `beside`, with the hidden
    states before the tokens that have a label."""
    forward, hidden = model.forward, []
    found = getclosurevars(forward).nonlocals  # by TRL, in the model's configuration
    scaling = {name: found[name] for name in ("logit_scale", "final_logit_softcapping", "temperature")}

    def keep_hidden(_module: nn.Module, _arguments: tuple, output: Any) -> None:
        hidden[:] = [output.last_hidden_state]

    @wraps(forward)
    def with_more(*arguments: Any, beside: Callable[[Head, Tensor], Any] | None = None, **named: Any) -> Any:
        output = forward(*arguments, **named)
        (last,), hidden[:] = list(hidden), []
        if beside is None:
            return output
        head, wanted = Head(model.get_output_embeddings(), **scaling), named["labels"][:, 1:] != -100
        with maybe_gather_lm_head_ctx(head.linear.weight, head.linear.bias):
            return ScoredOutput(**output, beside=beside(head, last[:, :-1][wanted]))

    model.base_model.register_forward_hook(keep_hidden)
    model.forward = with_more


def over_vocabulary(head: Head, hidden_NH: Tensor, strong: Head, strong_hidden_NH: Tensor, kl: Divergence) -> Tensor:
    """The divergence of each token over the whole vocabulary, of shape (N)."""
    own, others = ((each.logit_scale, each.final_logit_softcapping) for each in (head, strong))
    of_both = (hidden_NH, *head.weights(), strong_hidden_NH, *strong.weights())
    found, _entropy = ChunkedDivergenceFunction.apply(*of_both, _TRLS_BETA[kl], head.temperature, *own, *others)
    return found


def most_likely(head: Head, hidden_NH: Tensor, count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The most likely ones of the first `vocabulary` tokens, and the log-probs of these and of all others together, of
    shape (N, count) and (N, count + 1)."""
    found = []
    for _, product in _tiles(hidden_NH, *head.weights(), _compute_dtype(hidden_NH)):
        logits = head.logits(product)[:, :vocabulary]
        ids = logits.topk(count).indices
        found.append((ids, _of_outcomes(logits, ids)))
    ids_NK, logps = (torch.cat(each) for each in zip(*found, strict=True))
    return ids_NK, logps


def over_most_likely(
    head: Head, hidden_NH: Tensor, ids_NK: Tensor, strong_logps: Tensor, vocabulary: int, kl: Divergence
) -> Tensor:
    """The divergence of each token over what `most_likely` gave of the strong tutor, of shape (N)."""

    def of_tile(product: Tensor, rows: slice) -> Tensor:
        own = _of_outcomes(head.logits(product)[:, :vocabulary], ids_NK[rows])
        return divergence(own, strong_logps[rows], kl)

    return _InTiles.apply(hidden_NH, *head.weights(), of_tile)


def _of_outcomes(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probs of the tokens with these ids, and last that of all others together."""
    others = logits.scatter(-1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logits.gather(-1, ids), others], dim=-1) - logits.logsumexp(dim=-1, keepdim=True)


def _tiles(
    hidden_NH: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """The rows of each tile, and what the linear layer gives of them: float32, of inputs in the dtype. There is one
    tile at least, perhaps an empty one."""
    size, weight = max(1, _TILE // len(weight)), weight.to(dtype)
    for start in range(0, max(len(hidden_NH), 1), size):
        rows = hidden_NH[start : start + size].to(dtype)
        product = torch.empty(len(rows), len(weight), device=rows.device, dtype=torch.float32)
        _project(product, rows, weight, bias, 0, len(weight), dtype)
        yield slice(start, start + size), product


class _InTiles(torch.autograd.Function):
    """A number of each token, from what the linear layer of a head gives of it; the backward pass computes each tile
    again. Weights that are split between processes are gathered once in it, not for each tile: processes may have
    different numbers of tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of_tile: Callable[[Tensor, slice], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(hidden_NH, weight, bias)
        ctx.of_tile, ctx.dtype = of_tile, _compute_dtype(hidden_NH)
        return torch.cat([of_tile(product, rows) for rows, product in _tiles(hidden_NH, weight, bias, ctx.dtype)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight, bias = inputs = ctx.saved_tensors
        dtype = ctx.dtype
        with maybe_gather_lm_head_ctx(weight, bias):
            of_inputs = [
                torch.zeros_like(each, dtype=torch.float32) if wanted else None
                for each, wanted in zip(inputs, ctx.needs_input_grad[:3], strict=True)
            ]
            of_hidden, of_weight, of_bias = of_inputs
            rounded = weight.to(dtype)
            for rows, product in _tiles(hidden_NH, rounded, bias, dtype):
                with torch.enable_grad():
                    found = ctx.of_tile(product.requires_grad_(), rows)
                (of_product,) = torch.autograd.grad(found, product, gradients[0][rows])
                if of_bias is not None:
                    of_bias += of_product.sum(dim=0)
                of_product = of_product.to(dtype)
                if of_hidden is not None:
                    _addmm_fp32(of_hidden[rows], of_product, rounded)
                if of_weight is not None:
                    _addmm_fp32(of_weight, of_product.t(), hidden_NH[rows].to(dtype))
        found = [None if each is None else each.to(one.dtype) for each, one in zip(of_inputs, inputs, strict=True)]
        return *found, None
