"""Prompt templates: Jinja files, in which an unknown variable is an error and never an empty string."""

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from src.errors import DataError

_ENVIRONMENT = SandboxedEnvironment(
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False
)


@cache
def _load(path: str) -> jinja2.Template:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"There is no prompt template {path}.")
    try:
        return _ENVIRONMENT.from_string(file.read_text(encoding="utf-8"))
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"The prompt template {path} does not parse: line {error.lineno}: {error.message}.") from error


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
