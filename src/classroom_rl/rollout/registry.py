"""The environments by name, as the config key `environment` gives it."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from classroom_rl.errors import ConfigError
from classroom_rl.rollout.scheduler import PHASED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from classroom_rl.rollout.environment import Environment
    from classroom_rl.rollout.scheduler import Phase

ENVIRONMENTS = {
    "classroom": "classroom_rl.environments.classroom",
    "marooned": "classroom_rl.environments.marooned",
}
"""Maps a name to the environment's package. A package's dotted name can also be used directly."""


def module_of(environment: str, module: str) -> ModuleType:
    """Import a module of an environment's package.

    Raises:
        ConfigError: if there is no such environment.
    """
    package, cause = ENVIRONMENTS.get(environment, environment), None
    try:
        there = find_spec(f"{package}.{module}") is not None
    except (ImportError, ValueError) as error:
        there, cause = False, error
    if not there:
        raise ConfigError(
            f"environment is {environment!r}; there are {', '.join(ENVIRONMENTS)}, and every package with the modules "
            "that docs/environments.md names, by its dotted name."
        ) from cause
    return import_module(f"{package}.{module}")


def most_rows(config: Any) -> int | None:
    """The most messages of an episode, if every message of the configured environment has a prompt of its own and is a
    training row; None if a whole episode is one row. A package says so in its module `config`, with
    `rows_per_episode(generation)`; raises as `module_of` does."""
    count = getattr(module_of(config.environment, "config"), "rows_per_episode", None)
    return None if count is None else count(config.generation)


def environment_of(config: Any) -> "type[Environment]":
    """The environment that a configuration names; raises as `module_of` does."""
    return module_of(config.environment, "environment").Environment


def phases_of(config: Any) -> "Sequence[Phase]":
    """The phases of the configured environment; none with `generation.schedule: concurrent`."""
    return environment_of(config).phases if config.generation.schedule == PHASED else ()


def models_on_engines(config: Any, reward_weights: "Mapping[str, float]") -> dict[str, Any]:
    """The models that the server loads into engines, by seat, in the order of loading."""
    models = environment_of(config).models(config, reward_weights)
    return {seat: model for seat, model in models.items() if not model.is_remote}
