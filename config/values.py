"""What a single config value may be: ranges, and the names that transformers, TRL and vLLM know.

The names are written down here because asking the libraries would import torch; a test compares them.
"""

import math
from collections.abc import Sequence

from src.errors import ConfigError

EMBEDDED_JUDGES = ("rubric", "rules")
"""Judges without a model, as `model_name_or_path` names them."""

OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "sgd",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "lion_32bit",
    "paged_lion_8bit",
)
SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)
CISPO = "cispo"
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", CISPO, "sapo")
CISPO_LARGEST_RATIO = 5.0
"""What TRL recommends for `epsilon_high` with this loss, after ScaleRL; its own default would be that of `epsilon`."""
REWARD_SCALES = ("group", "batch", "none")
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
TRAINING_DTYPES = ("float32", "bfloat16", "float16")
ENGINE_DTYPES = ("auto", "bfloat16", "float16", "float32")
SCHEDULES = ("concurrent", "phased")
SCRIPT = "script:"
"""What the name of a teacher begins with that is no model: src/inference_providers/scripted_teacher.py."""
RESPONSE_FORMATS = ("auto", "json_schema", "text")
ADAPTER_BIASES = ("none", "all", "lora_only")
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM can be started with; each has room for lower ones."""
TRACKERS = ("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow",
            "neptune", "swanlab", "tensorboard", "trackio", "wandb")  # fmt: skip
LARGEST_SEED = 2**32 - 1  # numpy takes no larger one


def check_at_least(key: str, value: float, least: float) -> None:
    """Raises:
    ConfigError: for a smaller value, and for one that is no number or not finite.
    """
    if not (value >= least and math.isfinite(value)):
        raise ConfigError(f"{key} is {value}; it must be at least {least}.")


def check_above(key: str, value: float, bound: float) -> None:
    """Raises:
    ConfigError: for a value that is not greater than `bound`, and for one that is no number or not finite.
    """
    if not (value > bound and math.isfinite(value)):
        raise ConfigError(f"{key} is {value}; it must be above {bound}.")


def check_between(key: str, value: float, least: float, most: float) -> None:
    """Raises:
    ConfigError: for a value outside of [least, most].
    """
    if not least <= value <= most:
        raise ConfigError(f"{key} is {value}; it must be from {least} to {most}.")


def check_finite(key: str, value: float) -> None:
    """Raises:
    ConfigError: for infinity and for what is no number.
    """
    if not math.isfinite(value):
        raise ConfigError(f"{key} is {value}; it must be a finite number.")


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raises:
    ConfigError: for a value that is none of `choices`.
    """
    if value not in choices:
        raise ConfigError(f"{key} is {value}; it must be one of {', '.join(choices)}.")


def check_limit(key: str, value: int) -> None:
    """Raises:
    ConfigError: for a limit of examples that is neither a number of them nor −1 for all.
    """
    if value != -1 and value < 1:
        raise ConfigError(f"{key} is {value}; it must be at least 1, or -1 for all.")
