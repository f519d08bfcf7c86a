"""Keeps API keys and tokens out of messages and logs: finds their values in a text and replaces them."""

import logging
import os
import re
import sys

_VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_SECRET_NAME = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD)$")
_MIN_LENGTH = 16
"""In characters. A shorter value, such as `none` for a local server, is no secret and may occur in any text."""


def is_variable_name(text: str) -> bool:
    """Whether a text can be the name of an environment variable: capitals, digits and underscores only. Keys contain
    other characters, so a key that was given in place of its variable's name is recognised."""
    return _VARIABLE_NAME.fullmatch(text) is not None


def keys(variable: str | None = None) -> dict[str, str]:
    """The secrets in the environment, by variable name; the longest come first.

    These are the values of `variable` and of all variables whose names end in KEY, TOKEN, SECRET or PASSWORD, if they
    have at least `_MIN_LENGTH` characters.
    """
    secrets = {
        name: value
        for name, value in os.environ.items()
        if (name == variable or _SECRET_NAME.search(name)) and len(value) >= _MIN_LENGTH
    }
    # Longest first: if one secret contains another, the whole of it is replaced.
    return dict(sorted(secrets.items(), key=lambda item: -len(item[1])))


def without_keys(text: str, variable: str | None = None) -> str:
    """The text with each key replaced by the name of its variable; `variable` as for `keys`."""
    for name, value in keys(variable).items():
        text = text.replace(value, f"[{name}]")
    return text


def print_error(error: object) -> None:
    """Print the error that ends a program to standard error, without keys."""
    print(without_keys(f"error: {error}"), file=sys.stderr)


class FormatterWithoutKeys(logging.Formatter):
    """Formats log records, including tracebacks, without keys."""

    def format(self, record: logging.LogRecord) -> str:
        return without_keys(super().format(record))
