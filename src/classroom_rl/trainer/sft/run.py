"""Supervised fine-tuning on conversations, on a supervisor's corrections, or of a student on dialogues. The loss counts
the assistant's messages only, unless whole conversations are to be learned; the corrections; the student's messages."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import datasets
import torch
import yaml
from accelerate import DistributedType, PartialState
from pyarrow import ArrowException
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template

from classroom_rl.config.load import record_run, to_yaml
from classroom_rl.config.train_sft import MUON, ConversationSource, TrainSFTConfig
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.checkpoint_safety import refuse_unsafe_checkpoint
from classroom_rl.models.lora import check_adapter, check_checkpoint, peft_config
from classroom_rl.models.policy_folder import write_whole
from classroom_rl.models.precision import check_precision
from classroom_rl.models.pretrained import check_model, save_tokenizer
from classroom_rl.models.pretrained import load_tokenizer as load_any_tokenizer
from classroom_rl.results.hub import check_push, release
from classroom_rl.results.trackers import keep_tracked_run, report_to
from classroom_rl.rollout.datasets import cell_value, gather, load_rows
from classroom_rl.system.distributed import communication_backend, keep_deepspeed_from_compiling
from classroom_rl.trainer.callbacks import MetricsCallback, last_metrics
from classroom_rl.trainer.checkpoints import run_id_of
from classroom_rl.trainer.contents import (
    Contents,
    contents_of,
    differences,
    read_contents,
    refusal,
    unknown,
    write_contents,
)
from classroom_rl.trainer.model_loading import device_for_weights, prepare_cpu, weights_dtype
from classroom_rl.trainer.sft.corrections import are_corrections, read_examples
from classroom_rl.trainer.sft.muon import MuonWithAdamW
from classroom_rl.trainer.sft.padding_free import attend_within_sequences, collator_without_padding
from classroom_rl.trainer.sft.student import split_dialogues, student_examples, write_held_out
from classroom_rl.trainer.sharded_save import save_adapter_together, save_together, weight_bytes
from classroom_rl.trainer.trainer_hooks import ResumedTrainer

logger = logging.getLogger(__name__)
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"
_COLUMNS = ("conversation", "messages")
_FIXED = ("dataset.train_datasets", "model.model_name_or_path", "model.tokenizer_name_or_path")
"""The keys whose files must hold what they held when a training that resumes began."""
_ROLES = ("system", "user", "assistant")
_SECONDS_BETWEEN_LINES = 5.0

Conversation = list[dict[str, Any]]
"""Messages with `role`, `content` and any other field that the chat template reads. An assistant message of `weight` 0,
for example, is context without loss, if the template supports that."""


def train(config: TrainSFTConfig) -> Path:
    """Fine-tune and save a model. A run that was interrupted resumes from its last checkpoint in the same `save_dir`.

    Returns:
        The folder of the model, with tokenizer and chat template: `<logging.save_dir>/model`, which is complete or not
        there. An adapter is merged into it, and also saved by itself in `<logging.save_dir>/adapter`.

    Raises:
        ConfigError: if the model cannot be loaded, does not fit the tokenizer or the adapter, or if optimizer or
            precision do not fit the launch.
        DataError: if there are no conversations to learn from.
    """
    check_push(config.huggingface)
    check_precision(config.train.dtype, os.environ)
    if not torch.cuda.is_available():
        prepare_cpu(config.train.dtype)
    disable_progress_bar()  # for loading and saving; the training has its own
    run_folder = Path(config.logging.save_dir).resolve()
    lora = config.model.lora
    if lora.enable:
        check_adapter("model", config.model.model_name_or_path, lora)
    arguments = sft_arguments(config, run_folder)  # sets up the process group, too
    state = PartialState()
    _refuse_hidden_data_parallelism(state)
    if state.is_main_process:
        record_run(config, "train_sft")
        keep_tracked_run(arguments, run_id_of(run_folder))
        if config.student.held_out_share:
            write_held_out(config, run_folder)
    state.wait_for_everyone()
    contents = contents_of(yaml.safe_load(to_yaml(config)))
    last = _last_checkpoint(run_folder)
    if last is not None:
        _check_contents(Path(last), contents)
    trainer = make_trainer(config, arguments, run_folder)
    trainer.add_callback(_KeepContents(contents))
    if last is not None:
        refuse_unsafe_checkpoint(Path(last))
        check_checkpoint(Path(last), config.model.model_name_or_path, lora if lora.enable else None)
        logger.info("going on from %s; delete it to start over", last)
    trainer.train(resume_from_checkpoint=last)
    measured = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    if config.student.held_out_share:
        logger.info("loss on the held-out dialogues: %.4f before, %.4f after", measured[0], measured[-1])
    folder = _save_with_adapter(trainer, run_folder) if lora.enable else _save(trainer, config, run_folder)
    if state.is_main_process:
        release(folder, config, config.model.model_name_or_path, "sft", last_metrics(run_folder))
    return folder


class _KeepContents(TrainerCallback):
    """Writes into each checkpoint what the files of the configuration held when the training began."""

    def __init__(self, contents: Contents):
        self._contents = contents

    def on_save(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            write_contents(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", self._contents)


def _check_contents(checkpoint: Path, now: Contents) -> None:
    before = read_contents(checkpoint)
    if not before:
        logger.warning("%s", unknown(checkpoint))
    changed = list(differences(before, now))
    if wrong := [f"{path} is not what it was ({key})" for key, path in changed if key in _FIXED]:
        raise ConfigError(refusal(checkpoint, wrong))
    for key, path in changed:
        logger.warning("%s (%s) has changed since the training began", path, key)


def _refuse_hidden_data_parallelism(state: PartialState) -> None:
    if state.num_processes == 1 and torch.cuda.device_count() > 1:
        raise ConfigError(
            f"{torch.cuda.device_count()} GPUs are visible to one process. Start one process for each with `accelerate "
            "launch train_sft.py …`, or show it one with CUDA_VISIBLE_DEVICES=0."
        )


def make_trainer(config: TrainSFTConfig, arguments: SFTConfig, run_folder: Path) -> SFTTrainer:
    """The trainer with its model and its tokenised conversations or corrections. Labels are −100 where there is no
    loss."""
    tokenizer = load_tokenizer(config)
    learned, measured = read_datasets(config, tokenizer)
    model = load_model(config, tokenizer)
    without_padding = not torch.cuda.is_available() and attend_within_sequences(model)
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=learned,
        eval_dataset=measured,
        processing_class=tokenizer,
        callbacks=[MetricsCallback(run_folder, _SECONDS_BETWEEN_LINES)],
        optimizers=(_muon(config, model), None),
        peft_config=peft_config(config.model.lora) if config.model.lora.enable else None,
    )
    if without_padding:
        trainer.data_collator = collator_without_padding(tokenizer.pad_token_id)
    trainer.remove_callback(PrinterCallback)
    if not _come_as_tokens(config):
        _warn_about_truncation(trainer.train_dataset, len(learned), config.model.max_length)
    return trainer


def _come_as_tokens(config: TrainSFTConfig) -> bool:
    """Whether examples are made here, with their labels; false for conversations, which TRL tokenises."""
    return bool(config.student.student_personas_prompts_paths) or are_corrections(config.dataset.train_datasets)


class _Trainer(ResumedTrainer, SFTTrainer):
    """TRL's `SFTTrainer`, except that a resumed run uses the configured learning rate."""


def sft_arguments(config: TrainSFTConfig, run_folder: Path) -> SFTConfig:
    """TRL's arguments for this run. Creating them sets up the process group."""
    keep_deepspeed_from_compiling()
    options = config.train
    on_gpu = torch.cuda.is_available()
    return SFTConfig(
        output_dir=str(run_folder / "checkpoints"),
        per_device_train_batch_size=options.per_device_train_batch_size,
        per_device_eval_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        gradient_checkpointing=options.gradient_checkpointing,
        learning_rate=options.learning_rate,
        lr_scheduler_type=options.lr_scheduler_type,
        warmup_steps=options.warmup,
        optim="adamw_torch" if options.optimizer == MUON else options.optimizer,
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        bf16=options.dtype == "bfloat16",
        use_cpu=not on_gpu,
        ddp_backend=communication_backend(),
        dataloader_pin_memory=on_gpu,
        max_length=config.model.max_length,
        assistant_only_loss=options.assistant_only_loss and not _come_as_tokens(config),
        eval_strategy="epoch" if config.dataset.val_datasets or config.student.held_out_share else "no",
        eval_on_start=config.student.held_out_share > 0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps" if config.logging.save_steps else "no",
        save_steps=config.logging.save_steps or 1,
        save_total_limit=2,
        report_to=report_to(config.logging, run_folder),
        project=config.logging.wandb_project,
        run_name=config.logging.wandb_run_name,
        seed=config.seed,
        disable_tqdm=True,
    )


def load_tokenizer(config: TrainSFTConfig) -> PreTrainedTokenizerBase:
    """The tokenizer. If only the assistant's tokens are to be learned, its chat template has to mark them.

    Raises:
        ConfigError: if it cannot be loaded, or has no such template.
    """
    own = config.model.tokenizer_name_or_path is None
    key = "model.model_name_or_path" if own else "model.tokenizer_name_or_path"
    name = config.model.model_name_or_path if own else config.model.tokenizer_name_or_path
    tokenizer = load_any_tokenizer(key, name)
    if _come_as_tokens(config) or not config.train.assistant_only_loss:
        return tokenizer
    try:
        get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ConfigError(
            f"The chat template of {name} does not mark what the assistant says. Put {{% generation %}} and "
            "{% endgeneration %} around the assistant's message and its end token in it, or set "
            "train.assistant_only_loss=false to learn whole conversations."
        ) from error
    return tokenizer


def load_model(config: TrainSFTConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the model onto this process's device.

    Its weights are float32, while `train.dtype` is the precision of the arithmetic. They are in `train.dtype` if an
    adapter is trained, or under DeepSpeed, which makes its own float32 master weights.

    Raises:
        ConfigError: if it cannot be loaded, or its vocabulary or context is too small for the tokenizer or
            `model.max_length`.
    """
    name = config.model.model_name_or_path
    check_model("model.model_name_or_path", name)
    dtype = getattr(torch, weights_dtype(config.train.dtype, config.model.lora.enable))
    device = device_for_weights()
    try:
        model, notes = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            device_map=None if device is None else {"": device},
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the weights' sizes differ from config.json's
        raise ConfigError(f"The model {name} cannot be loaded: {error}") from error
    if notes["missing_keys"]:
        missing = sorted(notes["missing_keys"])
        raise ConfigError(f"The weights of {name} lack {len(missing)} of the model's tensors, the first {missing[0]}.")
    rows = model.config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise ConfigError(f"The tokenizer has {len(tokenizer)} tokens, but the model {name} knows only {rows}.")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and config.model.max_length > context:
        raise ConfigError(
            f"model.max_length is {config.model.max_length}, but the context of {name} is {context} tokens."
        )
    return model


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
    given, length = config.dataset, config.model.max_length
    if config.student.student_personas_prompts_paths:
        parts = [student_examples(part, config.student, tokenizer, length) for part in split_dialogues(config) if part]
        logger.info("%s examples of dialogues with a student", " and ".join(str(len(part)) for part in parts))
        learned, measured = [*map(datasets.Dataset.from_list, parts), None][:2]
        return learned, measured
    corrections = are_corrections([*given.train_datasets, *given.val_datasets])

    def read(sources: list[ConversationSource], limit: int) -> datasets.Dataset:
        if corrections:
            return datasets.Dataset.from_list(read_examples(sources, tokenizer, length, limit, config.seed))
        return _table_of(read_conversations(sources, limit, config.seed))

    learned = read(given.train_datasets, given.max_train_examples)
    measured = read(given.val_datasets, given.max_val_examples) if given.val_datasets else None
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
    wanted = [source.conversation_column] if source.conversation_column else list(_COLUMNS)
    column = next((name for name in wanted if name in rows.column_names), None)
    if column is None:
        raise DataError(
            f"{source.name_or_path} has no column {' or '.join(wanted)}. It has: {', '.join(rows.column_names)}. "
            "Name yours with conversation_column."
        )
    return list(_to_conversations(source.name_or_path, column, rows[column]))


def _to_conversations(name: str, column: str, cells: Any) -> Iterator[Conversation]:
    for number, given in enumerate(cells, start=1):
        cell = cell_value(given, f"{name}: row {number}, column {column}")
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


def _last_checkpoint(run_folder: Path) -> Optional[str]:
    checkpoints = run_folder / "checkpoints"
    return get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None


def _save_with_adapter(trainer: SFTTrainer, run_folder: Path) -> Path:
    """Write the adapter, then the model with the adapter merged in, and delete the checkpoints."""
    folder = run_folder / MODEL_FOLDER
    save_adapter_together(trainer, lambda save: write_whole(run_folder / ADAPTER_FOLDER, save))
    save_together(trainer, lambda save: write_whole(folder, save, weight_bytes(trainer.model)))
    if trainer.accelerator.is_main_process:
        shutil.rmtree(run_folder / "checkpoints", ignore_errors=True)
        logger.info("the adapter is in %s", run_folder / ADAPTER_FOLDER)
    trainer.accelerator.wait_for_everyone()
    return folder


def _save(trainer: SFTTrainer, config: TrainSFTConfig, run_folder: Path) -> Path:
    """Write the model on the main process, and delete the checkpoints."""
    folder = run_folder / MODEL_FOLDER
    accelerator = trainer.accelerator
    model = accelerator.unwrap_model(trainer.model)
    if accelerator.distributed_type is not DistributedType.DEEPSPEED:  # DeepSpeed's weights already have this dtype
        model.to(getattr(torch, config.train.dtype))
    weights = accelerator.get_state_dict(trainer.model_wrapped)
    if accelerator.is_main_process:

        def save(target: Path) -> None:
            model.save_pretrained(target, state_dict=weights)
            save_tokenizer(trainer.processing_class, target)

        write_whole(folder, save, needed=sum(weight.nbytes for weight in weights.values()))
        shutil.rmtree(run_folder / "checkpoints", ignore_errors=True)
    accelerator.wait_for_everyone()
    return folder
