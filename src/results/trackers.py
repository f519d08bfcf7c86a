"""An evaluation's figures in Weights & Biases."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config.eval_model import EvalConfig
from src.results.run_folder import is_number


def log_to_wandb(config: EvalConfig, metrics: Mapping[str, Any], folder: Path) -> None:
    """Log every number of metrics.json, its path as its name (`sampled/solve_rate/final/mean`), if `logging.wandb` or
    `logging.report_to` asks for it. WANDB_API_KEY is read from the environment."""
    if not (config.logging.wandb or "wandb" in config.logging.report_to):
        return
    import wandb

    from src.training.metrics_callback import set_tracker_environment

    set_tracker_environment(config.logging, folder)
    with wandb.init(name=config.logging.wandb_run_name, config=asdict(config)) as run:
        run.log(dict(numbers(metrics)))


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(path, number) of every number in nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif is_number(value):
            yield prefix + name, value
