"""What a training that goes on from a checkpoint may change. Every key of the configuration either takes effect from
there on, or has to stay as it was; both are told."""

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from config.load import to_yaml
from config.train_rl_model import TrainRLConfig
from src.errors import ConfigError

MADE_WITH = "train_rl.yaml"
"""The configuration that a checkpoint was made with, in its folder."""
_ORDER = "which problems a step takes follows from it"
_BATCH = "steps are counted in batches of this size"
_STATE = "the checkpoint holds a state for this one"
_WEIGHTS = "the checkpoint holds the weights of this one"
_ENVIRONMENT = "the weights were trained in that environment"
FIXED = {
    "environment": _ENVIRONMENT,
    "seed": _ORDER,
    "skip_first_samples": _ORDER,
    "dataset.train_datasets": _ORDER,
    "dataset.max_train_examples": _ORDER,
    "train.number_of_problems_per_batch": _BATCH,
    "train.num_samples_per_problem": _BATCH,
    "train.mu": _BATCH,
    "train.optimizer": _STATE,
    "train.dtype": _STATE,
    "teacher_model.model_name_or_path": _WEIGHTS,
    "teacher_model.lora.enable": _WEIGHTS,
    "teacher_model.lora.rank": _WEIGHTS,
    "teacher_model.lora.alpha": _WEIGHTS,
    "teacher_model.lora.target_modules": _WEIGHTS,
    "teacher_model.lora.dropout": _WEIGHTS,
    "teacher_model.lora.bias": _WEIGHTS,
}
"""What may not change, and why."""
TAKES_EFFECT = frozenset(
    f"train.{key}"
    for key in (
        "per_device_train_batch_size learning_rate lr_scheduler_type epochs max_steps beta epsilon epsilon_high "
        "loss_type scale_rewards max_grad_norm gradient_checkpointing reward_weights shuffle_rewards "
        "importance_sampling_correction importance_sampling_mode importance_sampling_clip_max keep_published_policies "
        "gpu_memory_gib"
    ).split()
)
"""What of the training itself may change. So may all that plays, judges and reports: no checkpoint holds any of it."""
_UNTOLD = ("dry_run", "logging.save_dir")


def write_config(checkpoint: Path, config: TrainRLConfig) -> None:
    """Put down in a checkpoint's folder what it is made with."""
    (checkpoint / MADE_WITH).write_text(to_yaml(config), encoding="utf-8")


def check_resume(run_folder: Path, config: TrainRLConfig) -> list[str]:
    """Compare a configuration with the one that the last checkpoint was made with.

    Returns:
        What differs and takes effect from there on, in words; nothing if there is no checkpoint.

    Raises:
        ConfigError: if something differs that may not, with both values, the reason and what to do.
    """
    checkpoints = (run_folder / "checkpoints").glob("checkpoint-*")
    steps = {int(path.name.rpartition("-")[2]): path for path in checkpoints if re.search(r"-\d+$", path.name)}
    if not steps:
        return []
    checkpoint = steps[max(steps)]
    if not (checkpoint / MADE_WITH).is_file():
        return [f"{checkpoint} does not say what it was made with ({MADE_WITH}): what has changed since is not noticed"]
    made_with = yaml.safe_load((checkpoint / MADE_WITH).read_text(encoding="utf-8"))
    changes = _changes(made_with, yaml.safe_load(to_yaml(config)))
    wrong = [f"{key} was {old} and is {new} now ({FIXED[key]})" for key, old, new in changes if key in FIXED]
    if wrong:
        raise ConfigError(
            f"The training cannot go on from {checkpoint}: {'; '.join(wrong)}. Set back what has changed, or give a "
            "new run another folder, logging.save_dir=…"
        )
    return [f"{key} changes from {old} to {new} after step {max(steps)}" for key, old, new in changes]


def keys_of(schema: type, prefix: str = "") -> list[str]:
    """The keys of a schema that hold a value: no groups, and nothing inside of lists and of groups that may be null."""
    keys: list[str] = []
    for item in fields(schema):
        name = prefix + item.name
        keys += keys_of(item.type, f"{name}.") if is_dataclass(item.type) else [name]
    return keys


def _changes(made_with: dict[str, Any], config: dict[str, Any]) -> list[tuple[str, str, str]]:
    changes = []
    for key in keys_of(TrainRLConfig):
        old, new = _text(made_with, key), _text(config, key)
        if old is not None and old != new and key not in _UNTOLD:  # None: the key is younger than the checkpoint
            changes.append((key, old, str(new)))
    return changes


def _text(config: dict[str, Any], key: str) -> str | None:
    """A value as text; paths in the run folder without it, for a folder may be moved, or spelt otherwise."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    folder = str(config["logging"]["save_dir"]).rstrip("/")
    return json.dumps(value, ensure_ascii=False).replace(f'"{folder}/', '"…/')
