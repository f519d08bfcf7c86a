"""The environments that there are, by the name that `environment` has in a configuration."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from src.errors import ConfigError
from src.rollout.scheduler import PHASED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from src.rollout.environment import Environment
    from src.rollout.scheduler import Phase

ENVIRONMENTS = {
    "classroom": "src.classroom",
}
"""From a name to the package that holds the environment. A package's own dotted name is a name, too."""


def module_of(environment: str, module: str) -> ModuleType:
    """A module of an environment's package; nothing is imported before it is asked for.

    Raises:
        ConfigError: if there is no such environment.
    """
    package = ENVIRONMENTS.get(environment, environment)
    try:
        there = find_spec(f"{package}.{module}") is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        raise ConfigError(
            f"environment is {environment!r}; there are {', '.join(ENVIRONMENTS)}, and every package with the modules "
            "that docs/environments.md names, by its dotted name."
        )
    return import_module(f"{package}.{module}")


def environment_of(config: Any) -> "type[Environment]":
    """The environment that a configuration names; raises as `module_of` does."""
    return module_of(config.environment, "environment").Environment


def phases_of(config: Any) -> "Sequence[Phase]":
    """The phases that a configuration's engines take turns by; none with `generation.schedule: concurrent`."""
    return environment_of(config).phases if config.generation.schedule == PHASED else ()


def models_on_engines(config: Any, reward_weights: "Mapping[str, float]") -> dict[str, Any]:
    """The models of a configuration that are loaded into engines of its server, by seat, in the order of loading."""
    models = environment_of(config).models(config, reward_weights)
    return {seat: model for seat, model in models.items() if not model.is_remote}
