"""Keys and tokens stay in the environment: finds their values in texts, and takes them out of messages."""

import logging
import os
import re
import sys

_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_OF_A_KEY = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD)$")
_SHORTEST = 16
"""Characters. A shorter value, such as the `none` of a local server, is no secret, and may be part of any text."""


def is_variable_name(text: str) -> bool:
    """Whether a text can be the name of an environment variable that holds a key: capitals, digits and underscores, of
    which keys themselves have others, too."""
    return _NAME.fullmatch(text) is not None


def keys(variable: str | None = None) -> dict[str, str]:
    """The keys in the environment by variable: the values, of at least `_SHORTEST` characters, of `variable` and of all
    variables whose names end in KEY, TOKEN, SECRET or PASSWORD. The longest come first."""
    found = {
        name: value
        for name, value in os.environ.items()
        if (name == variable or _OF_A_KEY.search(name)) and len(value) >= _SHORTEST
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def without_keys(text: str, variable: str | None = None) -> str:
    """The text with the name of its variable in place of each key; `variable` as for `keys`."""
    for name, value in keys(variable).items():
        text = text.replace(value, f"[{name}]")
    return text


def print_error(error: object) -> None:
    """Print an error as a program's last words, without the keys."""
    print(without_keys(f"error: {error}"), file=sys.stderr)


class FormatterWithoutKeys(logging.Formatter):
    """Formats log records, tracebacks included, without the keys."""

    def format(self, record: logging.LogRecord) -> str:
        return without_keys(super().format(record))
