"""Checks that accelerate and DeepSpeed are configured for the precision of `train.dtype`.

Otherwise they would train in another precision, or fail after the models are loaded.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from classroom_rl.errors import ConfigError

PRECISIONS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
"""accelerate's `mixed_precision` for each `train.dtype`. "no" is accepted for every dtype: `train.dtype` decides."""
_DEEPSPEED_BLOCKS = {"bf16": "bfloat16", "fp16": "float16"}


def check_precision(dtype: str, environment: Mapping[str, str]) -> None:
    """Compare `train.dtype` with the settings of `accelerate launch` in this process's environment.

    Raises:
        ConfigError: if they contradict each other.
    """
    refuse_other_precision(dtype, environment.get("ACCELERATE_MIXED_PRECISION"), "`accelerate launch` was told")
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if file not in (None, "", "none"):
        check_deepspeed_file(dtype, Path(file))


def refuse_other_precision(dtype: str, told: str | None, where: str) -> None:
    """Compare `train.dtype` with a value of accelerate's `mixed_precision`. None and "no" fit every dtype.

    Args:
        told: the value of `mixed_precision`.
        where: the source of that value, for the message.

    Raises:
        ConfigError: if they contradict each other.
    """
    precision = PRECISIONS[dtype]
    if (told or "no").lower() in ("no", precision):
        return
    matching_dtype = next((name for name, value in PRECISIONS.items() if value == told.lower()), None)
    alternative = f", or train.dtype={matching_dtype}" if matching_dtype else ""
    raise ConfigError(
        f"{where} mixed_precision {told}, but train.dtype is {dtype}, for which it is {precision}. Leave "
        f"mixed_precision at 'no', which has train.dtype decide, or set it to {precision}{alternative}."
    )


def check_deepspeed_file(dtype: str, file: Path) -> None:
    """Compare `train.dtype` with the blocks `bf16` and `fp16` of a DeepSpeed configuration (accelerate's
    `deepspeed_config_file`).

    Raises:
        ConfigError: if a block contradicts `train.dtype`, or the file cannot be read.
    """
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"accelerate's deepspeed_config_file {file} cannot be read: {error}") from error
    for block, block_dtype in _DEEPSPEED_BLOCKS.items():
        enabled = settings.get(block, {}).get("enabled", "auto")
        if enabled != "auto" and enabled != (dtype == block_dtype):
            raise ConfigError(
                f"{block}.enabled is {json.dumps(enabled)} in {file}, but train.dtype is {dtype}. Set it to "
                '"auto", which has train.dtype decide, or make the two agree.'
            )
