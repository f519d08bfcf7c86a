"""The environments that there are, by the name that `environment` has in a configuration."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from src.errors import ConfigError

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
