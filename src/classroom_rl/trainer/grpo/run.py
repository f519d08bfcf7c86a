"""A whole GRPO training, and one of another algorithm that is built on it."""

import os
from pathlib import Path

import torch

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.models.lora import check_adapter
from classroom_rl.models.precision import check_precision
from classroom_rl.system.distributed import check_fsdp
from classroom_rl.trainer.grpo.config import grpo_config
from classroom_rl.trainer.grpo.trainer import ClassroomGRPOTrainer
from classroom_rl.trainer.model_loading import prepare_cpu
from classroom_rl.trainer.session import training_session


def train(config: TrainRLConfig) -> None:
    """Train the teacher with GRPO; as `train_with`."""
    train_with(config, ClassroomGRPOTrainer)


def train_with(config: TrainRLConfig, trainer: type[ClassroomGRPOTrainer]) -> None:
    """Train the teacher with the running server. Started again on the same `save_dir`, it resumes from the last
    checkpoint.

    Raises:
        ConfigError: if an adapter does not fit its model, a checkpoint does not fit the configuration, or accelerate is
            configured for another precision, or for an FSDP that cannot train as is wanted.
        DeadlineExceeded: if no server answers.
        ClassroomError: on every rank, if the server refuses or fails.
    """
    check_precision(config.train.dtype, os.environ)
    check_fsdp(os.environ, has_reference=config.train.beta > 0 and config.teacher_model.adapter is None)
    if not torch.cuda.is_available():
        prepare_cpu(config.train.dtype)
    if config.teacher_model.adapter is not None:
        check_adapter("teacher_model", config.teacher_model.model_name_or_path, config.teacher_model.adapter)
    arguments = grpo_config(config, Path(config.logging.save_dir).resolve())  # sets up the process group, too
    with training_session(config) as session:
        session.run(trainer(session, arguments))
