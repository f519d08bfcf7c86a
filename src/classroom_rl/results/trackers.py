"""Experiment trackers: their environment variables for trainings, and metrics of evaluations in Weights & Biases."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classroom_rl.config.base import LoggingConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import ConfigError
from classroom_rl.results.run_folder import is_number

if TYPE_CHECKING:
    from transformers import TrainingArguments


def log_to_wandb(config: EvalConfig, metrics: Mapping[str, Any], folder: Path) -> None:
    """Log every number of metrics.json under its path (`sampled/solve_rate/final/mean`), if `logging.wandb` or
    `logging.report_to` asks for it. WANDB_API_KEY is read from the environment."""
    if not (config.logging.wandb or "wandb" in config.logging.report_to):
        return
    import wandb

    set_tracker_environment(config.logging, folder)
    with wandb.init(name=config.logging.wandb_run_name, config=asdict(config)) as run:
        run.log(dict(numbers(metrics)))


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (path, value) of every number in nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif is_number(value):
            yield prefix + name, value


def report_to(logging: LoggingConfig, run_folder: Path) -> list[str]:
    """Return the trackers of the configuration, for `TrainingArguments.report_to`, and set their environment variables.
    Raises `ConfigError` if a tracker is not installed."""
    # imported here, because it takes seconds and evaluations do not need it
    from transformers.integrations import get_available_reporting_integrations

    trackers = list(dict.fromkeys([*logging.report_to, *(["wandb"] if logging.wandb else [])]))
    for name in sorted(set(trackers) - set(get_available_reporting_integrations()) - {"flyte"}):
        raise ConfigError(
            f"logging asks for {name}, which is not installed or is turned off in the environment: pip install {name}, "
            "or take it out of logging.report_to."
        )
    set_tracker_environment(logging, run_folder)
    return trackers or ["none"]


def keep_tracked_run(arguments: "TrainingArguments", run_id: str) -> None:
    """Have a resumed training go on with its run in Weights & Biases, which knows it by its id, and in Trackio, which
    knows it by its name. An id that the environment sets is kept. Call it on the main process, before the training."""
    os.environ.setdefault("WANDB_RUN_ID", run_id)
    os.environ.setdefault("WANDB_RESUME", "allow")
    if "trackio" in arguments.report_to:
        arguments.run_name = arguments.run_name or run_id


def set_tracker_environment(logging: LoggingConfig, run_folder: Path) -> None:
    """Set the environment variables that trackers read. Folders that the environment already sets are kept."""
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run_folder / "tensorboard"))
    os.environ.setdefault("WANDB_DIR", str(run_folder))
    wandb = {
        "WANDB_PROJECT": logging.wandb_project,
        "WANDB_ENTITY": logging.wandb_entity,
        "WANDB_RUN_GROUP": logging.run_group,
        "WANDB_TAGS": ",".join(logging.wandb_tags),
    }
    os.environ.update({name: value for name, value in wandb.items() if value})
