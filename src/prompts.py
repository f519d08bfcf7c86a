"""Prompt templates: Jinja files, in which an unknown variable is an error and never an empty string."""

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import SandboxedEnvironment

from src.errors import DataError


def _refuse_null(value: Any) -> Any:
    """What is about to be written into a prompt, unless it is null: nobody wants to read "None" there."""
    if value is None:
        raise jinja2.UndefinedError("a value that it writes out is null; ask for it with an if")
    return value


_ENVIRONMENT = SandboxedEnvironment(
    undefined=jinja2.StrictUndefined,
    finalize=_refuse_null,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=False,
)


@cache
def _load(path: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(_parse(path))


def _parse(path: str) -> jinja2.nodes.Template:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"There is no prompt template {path}.")
    try:
        return _ENVIRONMENT.parse(file.read_text(encoding="utf-8"))
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"The prompt template {path} does not parse: line {error.lineno}: {error.message}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"The prompt template {path} is not UTF-8: {error}.") from error


def variables_of(path: str) -> set[str]:
    """The variables that the template at `path` uses.

    Raises:
        DataError: if the file is missing or does not parse.
    """
    return jinja2.meta.find_undeclared_variables(_parse(path))


def render(path: str, **variables: Any) -> str:
    """The template at `path` filled in with `variables`, without surrounding white space.

    Raises:
        DataError: if the file is missing, does not parse, uses a variable that was not given, or does what the sandbox
            forbids.
    """
    try:
        return _load(path).render(**variables).strip()
    except jinja2.UndefinedError as error:
        raise DataError(f"{path}: {error.message}. It may use: {', '.join(sorted(variables))}.") from error
    except jinja2.TemplateError as error:
        raise DataError(f"{path} cannot be filled in: {error.message}.") from error
