"""Supervised fine-tuning on conversations, on a supervisor's corrections, or of a student on dialogues. The loss counts
the assistant's messages only, unless whole conversations are to be learned; the corrections; the student's messages."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import datasets
import torch
from pyarrow import ArrowException
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from classroom_rl.config.train_sft import MUON, ConversationSource, TrainSFTConfig
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.lora import peft_config
from classroom_rl.rollout.datasets import cell_value, gather, load_rows
from classroom_rl.trainer.callbacks import MetricsCallback
from classroom_rl.trainer.fine_tuning import SECONDS_BETWEEN_LINES, common_arguments, fine_tune, load_model
from classroom_rl.trainer.fine_tuning import load_tokenizer as load_any_tokenizer
from classroom_rl.trainer.padding_free import attend_within_sequences
from classroom_rl.trainer.sft.corrections import are_corrections, read_examples
from classroom_rl.trainer.sft.muon import MuonWithAdamW
from classroom_rl.trainer.sft.student import split_dialogues, student_examples, write_held_out
from classroom_rl.trainer.trainer_hooks import ResumedTrainer

logger = logging.getLogger(__name__)
_COLUMNS = ("conversation", "messages")
_FIXED = ("dataset.train_datasets", "model.model_name_or_path", "model.tokenizer_name_or_path")
_ROLES = ("system", "user", "assistant")

Conversation = list[dict[str, Any]]
"""Messages with `role`, `content` and any other field that the chat template reads. An assistant message of `weight` 0,
for example, is context without loss, if the template supports that."""


def train(config: TrainSFTConfig) -> Path:
    """Fine-tune and save a model, as `fine_tune` does.

    Returns:
        The folder of the model, with tokenizer and chat template.

    Raises:
        ConfigError: as `fine_tune`, or if the optimizer does not fit the launch.
        DataError: if there are no conversations to learn from.
    """
    return fine_tune(config, "train_sft", "sft", sft_arguments, make_trainer, _FIXED)


def make_trainer(config: TrainSFTConfig, arguments: SFTConfig, run_folder: Path) -> SFTTrainer:
    """The trainer with its model and its tokenised conversations or corrections. Labels are −100 where there is no
    loss."""
    tokenizer = load_tokenizer(config)
    learned, measured = read_datasets(config, tokenizer)
    model = load_model(config, tokenizer)
    without_padding = not torch.cuda.is_available() and attend_within_sequences(model) is None
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=learned,
        eval_dataset=measured,
        processing_class=tokenizer,
        callbacks=[MetricsCallback(run_folder, SECONDS_BETWEEN_LINES)],
        optimizers=(_muon(config, model), None),
        peft_config=peft_config(config.model.lora) if config.model.lora.enable else None,
    )
    if without_padding:  # TRL's own option for it, `padding_free`, is refused together with a `max_length`
        trainer.data_collator = DataCollatorForLanguageModeling(tokenizer.pad_token_id, padding_free=True)
    trainer.remove_callback(PrinterCallback)
    if config.student.held_out_share:
        trainer.add_callback(_LogHeldOutLoss())
        if trainer.accelerator.is_main_process:
            write_held_out(config, run_folder)
    if not _come_as_tokens(config):
        _warn_about_truncation(trainer.train_dataset, len(learned), config.model.max_length)
    return trainer


def _come_as_tokens(config: TrainSFTConfig) -> bool:
    """Whether examples are made here, with their labels; false for conversations, which TRL tokenises."""
    return bool(config.student.student_personas_prompts_paths) or are_corrections(config.dataset.train_datasets)


class _LogHeldOutLoss(TrainerCallback):
    """Logs the loss on the held-out dialogues, of before the training and of its end."""

    def on_train_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        measured = [line["eval_loss"] for line in state.log_history if "eval_loss" in line]
        if measured and state.is_world_process_zero:
            logger.info("loss on the held-out dialogues: %.4f before, %.4f after", measured[0], measured[-1])


class _Trainer(ResumedTrainer, SFTTrainer):
    """TRL's `SFTTrainer`, except that a resumed run uses the configured learning rate."""


def sft_arguments(config: TrainSFTConfig, run_folder: Path) -> SFTConfig:
    """TRL's arguments for this run. Creating them sets up the process group."""
    return SFTConfig(
        **common_arguments(config, run_folder) | ({"optim": "adamw_torch"} if config.train.optimizer == MUON else {}),
        max_length=config.model.max_length,
        assistant_only_loss=config.train.assistant_only_loss and not _come_as_tokens(config),
        eval_strategy="epoch" if config.dataset.val_datasets or config.student.held_out_share else "no",
        eval_on_start=config.student.held_out_share > 0,
    )


def load_tokenizer(config: TrainSFTConfig) -> PreTrainedTokenizerBase:
    """The tokenizer. If only the assistant's tokens are to be learned, its chat template has to mark them.

    Raises:
        ConfigError: if it cannot be loaded, or has no such template.
    """
    tokenizer = load_any_tokenizer(config.model)
    if _come_as_tokens(config) or not config.train.assistant_only_loss:
        return tokenizer
    try:
        get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ConfigError(
            f"The chat template of {tokenizer.name_or_path} does not mark what the assistant says. Put "
            "{% generation %} and {% endgeneration %} around the assistant's message and its end token in it, or set "
            "train.assistant_only_loss=false to learn whole conversations."
        ) from error
    return tokenizer


def _muon(config: TrainSFTConfig, model: PreTrainedModel) -> Optional[MuonWithAdamW]:
    if config.train.optimizer != MUON:
        return None
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true" or os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise ConfigError(
            "train.optimizer=muon needs whole matrices, and DeepSpeed and FSDP cut them up: take another."
        )
    return MuonWithAdamW(model, config.train.learning_rate)


def read_datasets(
    config: TrainSFTConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[datasets.Dataset, Optional[datasets.Dataset]]:
    """The data to learn from, and the data to evaluate on (None if there is none), in the form that TRL reads:
    conversations as messages, corrections and dialogues of students as tokens with their labels.

    Raises:
        DataError: if they cannot be read, or corrections are mixed with conversations.
    """
    dataset, length = config.dataset, config.model.max_length
    if config.student.student_personas_prompts_paths:
        parts = [student_examples(part, config.student, tokenizer, length) for part in split_dialogues(config) if part]
        logger.info("%s examples of dialogues with a student", " and ".join(str(len(part)) for part in parts))
        learned, measured = [*map(datasets.Dataset.from_list, parts), None][:2]
        return learned, measured
    corrections = are_corrections([*dataset.train_datasets, *dataset.val_datasets])

    def read(sources: list[ConversationSource], limit: int) -> datasets.Dataset:
        if corrections:
            return datasets.Dataset.from_list(read_examples(sources, tokenizer, length, limit, config.seed))
        return _table_of(read_conversations(sources, limit, config.seed))

    learned = read(dataset.train_datasets, dataset.max_train_examples)
    measured = read(dataset.val_datasets, dataset.max_val_examples) if dataset.val_datasets else None
    count = len(learned) + (len(measured) if measured else 0)
    logger.info("reading %d corrections" if corrections else "tokenising %d conversations", count)
    return learned, measured


def _table_of(conversations: list[Conversation]) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_dict({"messages": conversations}, on_mixed_types="use_json")
    except (ArrowException, OverflowError) as error:
        raise DataError(
            f"The fields of the messages do not go into one table: {error}. Beside role and content, give each field "
            "values of one type, and write large numbers as text."
        ) from error


def read_conversations(
    sources: list[ConversationSource], limit: int = -1, seed: Optional[int] = None
) -> list[Conversation]:
    """The conversations of all sources.

    Args:
        limit: the maximum number of conversations; −1 for all.
        seed: shuffles the conversations; None keeps their order.

    Raises:
        DataError: with the file, the row, and what is wrong with it.
    """
    return gather(sources, _read_source, limit, seed)


def _read_source(source: ConversationSource) -> list[Conversation]:
    rows = load_rows(source)
    candidates = [source.conversation_column] if source.conversation_column else list(_COLUMNS)
    column = next((name for name in candidates if name in rows.column_names), None)
    if column is None:
        raise DataError(
            f"{source.name_or_path} has no column {' or '.join(candidates)}. It has: {', '.join(rows.column_names)}. "
            "Name yours with conversation_column."
        )
    return list(_to_conversations(source.name_or_path, column, rows[column]))


def _to_conversations(name: str, column: str, cells: Any) -> Iterator[Conversation]:
    for number, raw_cell in enumerate(cells, start=1):
        cell = cell_value(raw_cell, f"{name}: row {number}, column {column}")
        problem = _what_is_wrong(cell)
        if problem is not None:
            raise DataError(f"{name}: the conversation in row {number} {problem}.")
        yield cell


def _what_is_wrong(cell: Any) -> Optional[str]:
    if not isinstance(cell, list) or not cell:
        return "is not a list of messages"
    for message in cell:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            return "holds a message without role and content"
        if message["role"] not in _ROLES:
            return f"holds the role {message['role']!r}; there are {', '.join(_ROLES)}"
        if not isinstance(message["content"], str):
            return f"holds a message of the {message['role']} whose content is no text"
    if not any(_is_learned(message) for message in cell):
        return "holds nothing that the assistant says, so there is nothing to learn from it"
    return None


def _is_learned(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip()) and message.get("weight") != 0


def _warn_about_truncation(dataset: datasets.Dataset, given: int, max_length: int) -> None:
    """Warn about conversations that were truncated to `max_length` tokens, and about those that were left out because
    no assistant message is before the cut.

    Args:
        given: number of conversations before TRL left some out.

    Raises:
        DataError: if no conversation is left.
    """
    if len(dataset) == 0:
        raise DataError(
            f"No conversation has anything of the assistant in its first {max_length} tokens (model.max_length)."
        )
    full = sum(len(ids) == max_length for ids in dataset["input_ids"])
    if full or len(dataset) < given:
        logger.warning(
            "%d of %d conversations reach model.max_length (%d tokens) and may be cut there; %d more are left out "
            "because the assistant says nothing before it",
            full,
            given,
            max_length,
            given - len(dataset),
        )
