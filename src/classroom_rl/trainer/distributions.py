"""The policy's next-token distributions beside those of a strong tutor: how far they are from each other, computed by
the heads of both inside the policy's forward pass, in tiles that the backward pass computes again, so that no one holds
the logits of a micro-batch.

Over the strong tutor's K most likely tokens, all others are one more outcome, with the probability that they have
together. That divergence is never above the one over the whole vocabulary: how the others share what they have is not
compared.

Shapes: N is the number of wanted tokens of a micro-batch, H a model's width, V the size of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from classroom_rl.config.values import Divergence
from classroom_rl.memory.budget import DISTRIBUTIONS_TILE
from classroom_rl.trainer.critic import ScoredOutput
from classroom_rl.trainer.losses import divergence


@dataclass(frozen=True)
class Head:
    """The output head of a language model, and what becomes of its logits: they are scaled, capped, and divided by the
    sampling temperature."""

    linear: nn.Linear
    scale: float
    cap: float | None
    temperature: float

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float) -> "Head":
        """The head of a model, whose scale has as many names as TRL's fused head knows."""
        config = model.config.get_text_config()
        names = ("logit_scale", "output_multiplier", "lm_head_multiplier")
        scale = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
        if scale is None:
            scale = getattr(config, "logits_scaling", None) or 1.0  # by which all but one model divide
            scale = scale if config.model_type == "hyperclovax" else 1 / scale
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(model.get_output_embeddings(), scale, cap, temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits that are sampled from, in float32, of shape (…, V)."""
        logits = self.linear(hidden).float() * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits / self.temperature

    @property
    def tile(self) -> int:
        """How many tokens are one tile."""
        return max(1, DISTRIBUTIONS_TILE // len(self.linear.weight))


def share_head(model: PreTrainedModel, temperature: float) -> None:
    """Let others use the head of a model that has TRL's fused head inside its forward pass: what
    `model(…, head_hook=function)` gives has `function(head, hidden_NH)` in `hook_output`, with the hidden states before
    the tokens that have a label."""
    forward, hidden = model.forward, []

    def keep_hidden(_module: nn.Module, _arguments: tuple, output: Any) -> None:
        hidden[:] = [output.last_hidden_state]

    @wraps(forward)
    def with_more(*arguments: Any, head_hook: Callable[[Head, Tensor], Any] | None = None, **named: Any) -> Any:
        output = forward(*arguments, **named)
        (last,), hidden[:] = list(hidden), []
        if head_hook is None:
            return output
        has_label = named["labels"][:, 1:] != -100
        return ScoredOutput(**output, hook_output=head_hook(Head.of(model, temperature), last[:, :-1][has_label]))

    model.base_model.register_forward_hook(keep_hidden)
    model.forward = with_more


def most_likely(head: Head, hidden_NH: Tensor, count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The most likely ones of the first `vocabulary` tokens, and the log-probs of these and of all others together, of
    shape (N, count) and (N, count + 1)."""
    outcomes = []
    for tile in hidden_NH.split(head.tile):
        logits = head.logits(tile)[:, :vocabulary]
        ids = logits.topk(count).indices
        outcomes.append((ids, _of_outcomes(logits, ids)))
    ids_NK, logps = (torch.cat(parts) for parts in zip(*outcomes, strict=True))
    return ids_NK, logps


def over_vocabulary(head: Head, hidden_NH: Tensor, strong: Head, strong_hidden_NH: Tensor, kl: Divergence) -> Tensor:
    """The divergence of each token over the whole vocabulary, of shape (N)."""

    def of_tile(hidden: Tensor, strong_hidden: Tensor) -> Tensor:
        logps, strong_logps = (
            logits.log_softmax(dim=-1) for logits in (head.logits(hidden), strong.logits(strong_hidden))
        )
        return divergence(logps, strong_logps, kl)

    return _in_tiles(of_tile, head.tile, hidden_NH, strong_hidden_NH)


def over_most_likely(
    head: Head, hidden_NH: Tensor, ids_NK: Tensor, strong_logps: Tensor, vocabulary: int, kl: Divergence
) -> Tensor:
    """The divergence of each token over what `most_likely` gave of the strong tutor, of shape (N)."""

    def of_tile(hidden: Tensor, ids: Tensor, others: Tensor) -> Tensor:
        return divergence(_of_outcomes(head.logits(hidden)[:, :vocabulary], ids), others, kl)

    return _in_tiles(of_tile, head.tile, hidden_NH, ids_NK, strong_logps)


def _of_outcomes(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probs of the tokens with these ids, and last that of all others together."""
    others = logits.scatter(-1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logits.gather(-1, ids), others], dim=-1) - logits.logsumexp(dim=-1, keepdim=True)


def _in_tiles(of_tile: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
    """A number of each token; nothing of a tile is kept for the backward pass."""
    checkpointed = partial(checkpoint, of_tile, use_reentrant=False)
    return torch.cat([checkpointed(*tiles) for tiles in zip(*(tensor.split(size) for tensor in tensors), strict=True)])
