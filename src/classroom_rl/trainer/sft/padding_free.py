"""Fine-tuning without padding on CPUs: the conversations of a micro-batch stand in one row, one after the other, and
each attends to itself alone. PyTorch's attention is called for each of them."""

from typing import Any, Optional

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

_SDPA, _OF_EACH_SEQUENCE = "sdpa", "sdpa_of_each_sequence"
_FULL = "full_attention"


def attend_within_sequences(model: PreTrainedModel) -> bool:
    """Have a model read rows of several sequences, if it attends by PyTorch's function and looks back without limit.

    Returns:
        Whether it does; if not, it needs rows that are padded.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    looks_back = set(kinds) == {_FULL} if kinds else getattr(config, "sliding_window", None) is None
    if model.config._attn_implementation != _SDPA or not looks_back:
        return False
    AttentionInterface.register(_OF_EACH_SEQUENCE, attention_of_each_sequence)
    AttentionMaskInterface.register(_OF_EACH_SEQUENCE, _no_mask)
    model.set_attn_implementation(_OF_EACH_SEQUENCE)
    return model.config._attn_implementation == _OF_EACH_SEQUENCE


def attention_of_each_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    cu_seq_lens_q: Optional[Tensor] = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a row, as transformers' `sdpa` computes it for one.

    Args:
        query, key, value: of shape (1, heads, tokens, head size).
        cu_seq_lens_q: where sequences begin, and where the last one ends; None for a row that is one sequence.

    Returns:
        Shape (1, tokens, heads, head size), and no weights.
    """
    lengths = [query.size(2)] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    sequences = zip(*(whole.split(lengths, dim=2) for whole in (query, key, value)), strict=True)
    found = [sdpa_attention_forward(module, *each, attention_mask, **options)[0] for each in sequences]
    return torch.cat(found, dim=1), None


def collator_without_padding(pad_token_id: int) -> DataCollatorForLanguageModeling:
    """Puts the examples of a micro-batch into one row, and says where each begins. TRL's own option for it,
    `padding_free`, is refused together with a `max_length`."""
    return DataCollatorForLanguageModeling(pad_token_id, padding_free=True)


def _no_mask(*_: Any, **__: Any) -> None:
    return None
