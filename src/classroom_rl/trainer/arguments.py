"""Translates the project's configuration to transformers' training arguments."""

import math
import os
from pathlib import Path

import torch
from transformers import TrainingArguments

from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.config.values import ABSOLUTE, BNPO, KEEP
from classroom_rl.errors import ConfigError
from classroom_rl.results.trackers import report_to
from classroom_rl.system.distributed import (
    communication_backend,
    keep_deepspeed_from_compiling,
    let_fsdp_run_on_cpus,
    open_process_group_on_cpus,
)

_COMPUTING_S = 1800
_OBJECTIVE = {
    "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": None,
    "use_liger_kernel": False,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "warmup_steps": 0,
    "average_tokens_across_devices": False,
}
"""Options of transformers that change what is learned and have no key of their own: set here, so that another version
with other defaults trains for the same. The constants of the losses are in `losses.py`."""


def training_arguments(config: TrainRLConfig, run_folder: Path) -> TrainingArguments:
    """The arguments of this run: one optimizer step for each of the `mu` passes over a batch. Making them sets up the
    process group.

    Raises:
        ConfigError: if the batch is not divisible by micro-batch size × processes, if processes share groups that are
            judged, left out or replaced as a whole, if an option needs a GPU, or if this process sees more than one.
    """
    keep_deepspeed_from_compiling()
    let_fsdp_run_on_cpus()
    train = config.train
    batch = train.number_of_problems_per_batch * train.num_samples_per_problem
    rows = train.per_device_train_batch_size
    _check_gpu(train)
    _check_divides(batch, rows if train.loss_type == BNPO else 1)
    _check_whole_groups(config, batch)
    timeout_s = collective_timeout_s(config)
    open_process_group_on_cpus(timeout_s)
    arguments = TrainingArguments(
        **_OBJECTIVE,
        output_dir=str(run_folder / "checkpoints"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,  # the loop has micro-batches of its own
        max_steps=train.max_steps,
        num_train_epochs=train.epochs,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        optim=train.optimizer,
        max_grad_norm=train.max_grad_norm,
        gradient_checkpointing=train.gradient_checkpointing,
        bf16=train.dtype == "bfloat16",
        fp16=train.dtype == "float16",
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=communication_backend(),
        ddp_timeout=timeout_s,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=math.ceil(config.logging.save_steps / train.mu) * train.mu,  # no resume in the middle of a batch
        save_total_limit=2,
        report_to=report_to(config.logging, run_folder),
        project=config.logging.wandb_project,
        run_name=config.logging.wandb_run_name,
        seed=config.seed,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"This process sees {arguments.n_gpu} GPUs and would train on copies of the model in threads. Start one "
            "process for each GPU (start_rl_training.sh, or accelerate launch), or show it one with "
            "CUDA_VISIBLE_DEVICES."
        )
    return arguments


def collective_timeout_s(config: TrainRLConfig) -> int:
    """The timeout of collective operations between the training's processes, in seconds.

    It exceeds the longest time between two collectives: that of a batch (played ahead, its messages and its verdicts
    are awaited one after the other), or of a server that restarts and loads the weights, plus torch's default of 30
    minutes for reading and writing models and for computing.
    """
    generation = config.generation
    batch_s = generation.sample_timeout_s * (2 if config.train.max_staleness > 0 else 1)
    loaded_s = generation.server_start_timeout_s + generation.load_weights_timeout_s
    return math.ceil(max(batch_s, loaded_s)) + _COMPUTING_S


def _check_gpu(train: TrainConfig) -> None:
    for key in ("use_liger_kernel", "activation_offloading"):
        if getattr(train, key) and not torch.cuda.is_available():
            raise ConfigError(f"train.{key} is true, but this process sees no GPU, which it needs: set it to false.")


def _check_whole_groups(config: TrainRLConfig, batch: int) -> None:
    """Refuse processes that share a group where it is judged, left out or replaced as a whole: each process asks for
    its own conversations."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    share, group = batch // processes, config.train.num_samples_per_problem
    for key, value, allowed in (
        ("judge_model.mode", config.judge_model.mode, ABSOLUTE),
        ("train.groups_without_variance", config.train.groups_without_variance, KEEP),
    ):
        if share % group and value != allowed:
            raise ConfigError(
                f"{key} is {value}, but each of {processes} processes plays {share} conversations of a batch, and a "
                f"group has {group}: raise train.number_of_problems_per_batch to a multiple of {processes}, or set "
                f"{key}={allowed}."
            )


def _check_divides(batch: int, rows: int) -> None:
    """Refuse a batch of which the processes, or their micro-batches of so many rows, would have uneven shares."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if batch % (rows * processes):
        share = (
            f" and train.per_device_train_batch_size ({rows} × {processes} = {rows * processes})" if rows > 1 else ""
        )
        raise ConfigError(
            f"A batch of {batch} conversations must be divisible by the number of processes, {processes}{share}."
        )
