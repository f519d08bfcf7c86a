"""Training without padding: the sequences of a micro-batch stand in one row, one after the other, and each attends to
itself alone. Flash attention does that by itself; for `sdpa`, PyTorch's attention is called for each sequence."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.generic import is_flash_attention_requested

from classroom_rl.errors import ConfigError
from classroom_rl.trainer.log_probs import can_trim_padding

_SDPA, _OF_EACH_SEQUENCE = "sdpa", "sdpa_of_each_sequence"
_FULL, _WINDOW = "full_attention", "sliding_attention"


def attend_within_sequences(model: PreTrainedModel) -> str | None:
    """Have a model read rows of several sequences, if none of them would see another.

    Returns:
        Why it cannot, as the end of a sentence; then it is left as it was and needs rows that are padded. None if it
        can.
    """
    config, attention = model.config.get_text_config(), model.config._attn_implementation
    flash = is_flash_attention_requested(model.config)
    kinds = set(getattr(config, "layer_types", None) or [])
    window = _WINDOW in kinds or (not kinds and getattr(config, "sliding_window", None) is not None)
    if not flash and attention != _SDPA:
        return f"its attention is {attention}, which is neither sdpa nor flash attention"
    if unsupported := sorted(kinds - {_FULL, _WINDOW}):
        return f"it has layers of {unsupported[0]}, which would go on from one sequence to the next"
    if model._is_stateful:
        return "it has a state that would go on from one sequence to the next"
    if not can_trim_padding(model):
        return "its rotary positions depend on the length of the row"
    if window and not flash:
        return "it looks back through a window, which only flash attention keeps"
    if not model.is_backend_compatible():
        return "it does not say to its attention where sequences begin"
    if not flash:
        AttentionInterface.register(_OF_EACH_SEQUENCE, attention_of_each_sequence)
        AttentionMaskInterface.register(_OF_EACH_SEQUENCE, _no_mask)
        model.set_attn_implementation(_OF_EACH_SEQUENCE)
    return None


def attention_of_each_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a row, as transformers' `sdpa` computes it for one.

    Args:
        query, key, value: of shape (1, heads, tokens, head size).
        cu_seq_lens_q: where sequences begin, and where the last one ends.

    Returns:
        Shape (1, tokens, heads, head size), and no weights.

    Raises:
        ConfigError: if the model does not pass on where sequences begin.
    """
    if cu_seq_lens_q is None:
        raise ConfigError(
            f"{type(module).__name__} is not told where the sequences of a row begin, so they would see each other: "
            "the model cannot be trained without padding."
        )
    lengths = _lengths(cu_seq_lens_q)
    sequences = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *qkv, attention_mask, **options)[0] for qkv in sequences]
    return torch.cat(outputs, dim=1), None


@lru_cache(maxsize=1)
def _lengths(cu_seq_lens: Tensor) -> list[int]:
    """The lengths of sequences; read from the GPU once, not in every layer: tensors are the same if they are one."""
    return cu_seq_lens.diff().tolist()


def _no_mask(*_: Any, **__: Any) -> None:
    return None
