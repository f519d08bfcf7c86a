"""What a configuration may say of the guessing game."""

from dataclasses import dataclass
from typing import Any

from classroom_rl.config.base import EnvironmentConfig
from classroom_rl.config.values import check_between

REWARD_NAMES = ("found", "in_range")


@dataclass
class Generation(EnvironmentConfig):
    """The `generation` block: the numbers go from 0 to `largest`."""

    largest: int = 7


def default_weights(generation: Generation) -> dict[str, float]:
    """To find the number counts most."""
    return {"found": 1.0, "in_range": 0.5}


def check(config: Any) -> None:
    """Raises:
    ConfigError: for numbers of more than one digit.
    """
    check_between("generation.largest", config.generation.largest, 1, 9)
