"""Functions of one's own, which a configuration names as `package.module:function`: rewards and losses."""

import difflib
import re
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from classroom_rl.errors import ConfigError

FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""The form of such a name."""


def is_function(name: str) -> bool:
    """Whether a name has the form `package.module:function`."""
    return FUNCTION.fullmatch(name) is not None


def function_of(key: str, name: str, shipped: Collection[str]) -> Callable[..., Any]:
    """Import the function that a configuration names.

    Args:
        key: the key that names it, for messages.
        shipped: what the key may name besides.

    Raises:
        ConfigError: if there is none, with the nearest names.
    """
    if not is_function(name):
        raise ConfigError(
            f"{key} names {name}; {_nearest(name, shipped)}there are: {', '.join(shipped)}, and functions of your own "
            "as package.module:function."
        )
    module_name, _, function_name = name.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key} names {name}, but {module_name} cannot be imported: {error}.") from error
        raise ConfigError(
            f"{key} names {name}, but there is no module {error.name}: set PYTHONPATH to the folder that holds it, for "
            "every program of the run."
        ) from error
    except Exception as error:  # whatever its code raises
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key} names {name}, but {module_name} cannot be imported: {reason}.") from error
    if not hasattr(module, function_name):
        names = [
            attribute
            for attribute in vars(module)
            if not attribute.startswith("_") and callable(getattr(module, attribute))
        ]
        raise ConfigError(
            f"{key} names {name}; {_nearest(function_name, names)}{module_name} has: {', '.join(names) or 'nothing'}."
        )
    function = getattr(module, function_name)
    if not callable(function):
        raise ConfigError(f"{key} names {name}, which is no function, but a {type(function).__name__}.")
    typed_function: Callable[..., Any] = function
    return typed_function


def _nearest(name: str, known: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]}? " if nearest else ""
