"""Fine-tuning on corrections: a supervisor's `corrections.parquet` is trained on as the tokens that it holds."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from classroom_rl.config.train_sft import ConversationSource
from classroom_rl.errors import DataError
from classroom_rl.results.corrections import (
    decided,
    holds_corrections,
    read_corrections,
    read_decisions,
    refuse_other_tokenizer,
)
from classroom_rl.rollout.chat_template import encode_reply
from classroom_rl.rollout.datasets import gather

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
MASKED = -100
"""The label of a token without loss."""

Example = dict[str, list[int]]
"""`input_ids`, and `labels` of the same length: `MASKED` on the prompt, the target's own ids on the target."""


def are_corrections(sources: Sequence[ConversationSource]) -> bool:
    """Whether the datasets are files of corrections; false for conversations.

    Raises:
        DataError: if some are and some are not.
    """
    kinds = {source.name_or_path: holds_corrections(Path(source.name_or_path)) for source in sources}
    if len(set(kinds.values())) > 1:
        files = ", ".join(name for name, holds in kinds.items() if holds)
        others = ", ".join(name for name, holds in kinds.items() if not holds)
        raise DataError(
            f"{files} holds corrections and {others} conversations. Train on each in a run of its own, the second one "
            "with the model of the first; dataset.val_datasets must be of the same kind."
        )
    return True in kinds.values()


def read_examples(
    sources: Sequence[ConversationSource],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    limit: int = -1,
    seed: Optional[int] = None,
) -> list[Example]:
    """The examples of all files of corrections. Those longer than `max_length` tokens are left out with a warning: a
    target that is cut is no longer the one that was checked.

    Args:
        limit: the maximum number of examples; −1 for all.
        seed: shuffles the examples; None keeps their order.

    Raises:
        DataError: if a file's ids are of another tokenizer, a row has no prompt or no target, or none is short enough.
    """
    examples = gather(sources, lambda source: _read_file(source.name_or_path, tokenizer), limit, seed)
    short = [example for example in examples if len(example["input_ids"]) <= max_length]
    if not short:
        raise DataError(f"No correction has at most {max_length} tokens, its prompt included (model.max_length).")
    if len(short) < len(examples):
        logger.warning(
            "%d of %d corrections have more than %d tokens (model.max_length) and are left out",
            len(examples) - len(short),
            len(examples),
            max_length,
        )
    return short


def _read_file(name: str, tokenizer: "PreTrainedTokenizerBase") -> list[Example]:
    """The examples of a file, as people decided about its corrections in the same run folder."""
    corrections, fingerprint = read_corrections(Path(name))
    refuse_other_tokenizer(name, fingerprint, tokenizer)
    for number, correction in enumerate(corrections, start=1):
        if not correction.prompt_ids or not correction.target_ids:
            lacking = "target" if correction.prompt_ids else "prompt"
            raise DataError(f"{name}: the correction in row {number} has no {lacking}_ids.")
    kept = decided(corrections, read_decisions(Path(name).parent), partial(encode_reply, tokenizer))
    return [
        {
            "input_ids": [*correction.prompt_ids, *correction.target_ids],
            "labels": [MASKED] * len(correction.prompt_ids) + list(correction.target_ids),
        }
        for correction in kept
    ]
