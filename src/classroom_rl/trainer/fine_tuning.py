"""What the fine-tunings share (on conversations and corrections: `sft`; on pairs: `preferences`): the run folder, the
model, resuming and saving."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
import yaml
from accelerate import DistributedType, PartialState
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from classroom_rl.config.load import record_run, to_yaml
from classroom_rl.config.train_preferences import TrainPreferencesConfig
from classroom_rl.config.train_sft import TrainSFTConfig, TrainSFTModelConfig
from classroom_rl.errors import ConfigError
from classroom_rl.models import pretrained
from classroom_rl.models.checkpoint_safety import refuse_unsafe_checkpoint
from classroom_rl.models.lora import check_adapter, check_checkpoint
from classroom_rl.models.policy_folder import write_whole
from classroom_rl.models.precision import check_precision
from classroom_rl.results.hub import check_push, release
from classroom_rl.results.trackers import keep_tracked_run, report_to
from classroom_rl.system.distributed import communication_backend, keep_deepspeed_from_compiling
from classroom_rl.trainer.callbacks import last_metrics
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
from classroom_rl.trainer.sharded_save import save_adapter_together, save_together, weight_bytes

logger = logging.getLogger(__name__)
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"
SECONDS_BETWEEN_LINES = 5.0

FineTuning = TrainSFTConfig | TrainPreferencesConfig


def fine_tune(
    config: Any,
    program: str,
    method: str,
    make_arguments: Callable[[Any, Path], TrainingArguments],
    make_trainer: Callable[[Any, Any, Path], Trainer],
    fixed: Sequence[str],
) -> Path:
    """Fine-tune and save a model. A run that was interrupted resumes from its last checkpoint in the same `save_dir`.

    Args:
        config: a `FineTuning`.
        program: the name of the program, without its suffix.
        method: a key of `hub.METHODS`.
        fixed: the keys whose files must hold what they held when a training that resumes began.

    Returns:
        The folder of the model, with tokenizer and chat template: `<logging.save_dir>/model`, which is complete or not
        there. An adapter is merged into it, and also saved by itself in `<logging.save_dir>/adapter`.

    Raises:
        ConfigError: if the model cannot be loaded, does not fit the tokenizer or the adapter, or if the precision does
            not fit the launch.
        DataError: if there is nothing to learn from.
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
    arguments = make_arguments(config, run_folder)  # sets up the process group, too
    state = PartialState()
    refuse_hidden_data_parallelism(state, program)
    if state.is_main_process:
        record_run(config, program)
        keep_tracked_run(arguments, run_id_of(run_folder))
    state.wait_for_everyone()
    contents = contents_of(yaml.safe_load(to_yaml(config)))
    checkpoint = _last_checkpoint(run_folder)
    if checkpoint is not None:
        _check_contents(Path(checkpoint), contents, fixed)
    trainer = make_trainer(config, arguments, run_folder)
    trainer.add_callback(_KeepContents(contents))
    if checkpoint is not None:
        refuse_unsafe_checkpoint(Path(checkpoint))
        check_checkpoint(Path(checkpoint), config.model.model_name_or_path, lora if lora.enable else None)
        logger.info("going on from %s; delete it to start over", checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)
    folder = _save_with_adapter(trainer, run_folder) if lora.enable else _save(trainer, config, run_folder)
    if state.is_main_process:
        release(folder, config, config.model.model_name_or_path, method, last_metrics(run_folder))
    return folder


class _KeepContents(TrainerCallback):
    """Writes into each checkpoint what the files of the configuration held when the training began."""

    def __init__(self, contents: Contents):
        self._contents = contents

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            write_contents(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", self._contents)


def _check_contents(checkpoint: Path, now: Contents, fixed: Sequence[str]) -> None:
    before = read_contents(checkpoint)
    if not before:
        logger.warning("%s", unknown(checkpoint))
    changed = list(differences(before, now))
    if wrong := [f"{path} is not what it was ({key})" for key, path in changed if key in fixed]:
        raise ConfigError(refusal(checkpoint, wrong))
    for key, path in changed:
        logger.warning("%s (%s) has changed since the training began", path, key)


def refuse_hidden_data_parallelism(state: PartialState, program: str) -> None:
    """Refuse one process that sees several GPUs.

    Raises:
        ConfigError: says how to start one for each.
    """
    if state.num_processes == 1 and torch.cuda.device_count() > 1:
        raise ConfigError(
            f"{torch.cuda.device_count()} GPUs are visible to one process. Start one process for each with `accelerate "
            f"launch {program}.py …`, or show it one with CUDA_VISIBLE_DEVICES=0."
        )


def common_arguments(config: FineTuning, run_folder: Path) -> dict[str, Any]:
    """The arguments that TRL's trainers share. To create their class sets up the process group."""
    keep_deepspeed_from_compiling()
    options = config.train
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(run_folder / "checkpoints"),
        "per_device_train_batch_size": options.per_device_train_batch_size,
        "per_device_eval_batch_size": options.per_device_train_batch_size,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "gradient_checkpointing": options.gradient_checkpointing,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": options.lr_scheduler_type,
        "warmup_steps": options.warmup,
        "optim": options.optimizer,
        "num_train_epochs": options.epochs,
        "max_steps": options.max_steps,
        "bf16": options.dtype == "bfloat16",
        "use_cpu": not on_gpu,
        "ddp_backend": communication_backend(),
        "dataloader_pin_memory": on_gpu,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps" if config.logging.save_steps else "no",
        "save_steps": config.logging.save_steps or 1,
        "save_total_limit": 2,
        "report_to": report_to(config.logging, run_folder),
        "project": config.logging.wandb_project,
        "run_name": config.logging.wandb_run_name,
        "seed": config.seed,
        "disable_tqdm": True,
    }


def load_tokenizer(model: TrainSFTModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that a configuration names.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    if model.tokenizer_name_or_path is None:
        return pretrained.load_tokenizer("model.model_name_or_path", model.model_name_or_path)
    return pretrained.load_tokenizer("model.tokenizer_name_or_path", model.tokenizer_name_or_path)


def load_model(config: FineTuning, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the model onto this process's device.

    Its weights are float32, while `train.dtype` is the precision of the arithmetic. They are in `train.dtype` if an
    adapter is trained, or under DeepSpeed, which makes its own float32 master weights.

    Raises:
        ConfigError: if it cannot be loaded, or its vocabulary or context is too small for the tokenizer or
            `model.max_length`.
    """
    name = config.model.model_name_or_path
    pretrained.check_model("model.model_name_or_path", name)
    dtype = getattr(torch, weights_dtype(config.train.dtype, config.model.lora.enable))
    device = device_for_weights()
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            device_map=None if device is None else {"": device},
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the weights' sizes differ from config.json's
        raise ConfigError(f"The model {name} cannot be loaded: {error}") from error
    if loading_info["missing_keys"]:
        missing = sorted(loading_info["missing_keys"])
        raise ConfigError(f"The weights of {name} lack {len(missing)} of the model's tensors, the first {missing[0]}.")
    vocab_size = model.config.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        raise ConfigError(f"The tokenizer has {len(tokenizer)} tokens, but the model {name} knows only {vocab_size}.")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and config.model.max_length > context:
        raise ConfigError(
            f"model.max_length is {config.model.max_length}, but the context of {name} is {context} tokens."
        )
    return model


def _last_checkpoint(run_folder: Path) -> Optional[str]:
    checkpoints = run_folder / "checkpoints"
    return get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None


def _save_with_adapter(trainer: Trainer, run_folder: Path) -> Path:
    """Write the adapter, then the model with the adapter merged in, and delete the checkpoints."""
    folder = run_folder / MODEL_FOLDER
    save_adapter_together(trainer, lambda save: write_whole(run_folder / ADAPTER_FOLDER, save))
    save_together(trainer, lambda save: write_whole(folder, save, weight_bytes(trainer.model)))
    if trainer.accelerator.is_main_process:
        shutil.rmtree(run_folder / "checkpoints", ignore_errors=True)
        logger.info("the adapter is in %s", run_folder / ADAPTER_FOLDER)
    trainer.accelerator.wait_for_everyone()
    return folder


def _save(trainer: Trainer, config: FineTuning, run_folder: Path) -> Path:
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
            pretrained.save_tokenizer(trainer.processing_class, target)

        write_whole(folder, save, needed=sum(weight.nbytes for weight in weights.values()))
        shutil.rmtree(run_folder / "checkpoints", ignore_errors=True)
    accelerator.wait_for_everyone()
    return folder
