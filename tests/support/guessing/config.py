"""What a configuration may say of the guessing game."""

from typing import Annotated

from classroom_rl.config.base import EnvironmentConfig
from classroom_rl.config.fields import Whole, between, config_group

REWARD_NAMES = ("found", "in_range")


@config_group
class Generation(EnvironmentConfig):
    """The `generation` block: the numbers go from 0 to `largest`, which is one digit."""

    largest: Annotated[Whole, between(1, 9)] = 7


def default_weights(generation: Generation) -> dict[str, float]:
    """To find the number counts most."""
    return {"found": 1.0, "in_range": 0.5}
