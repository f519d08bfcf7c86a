"""Cleans text and JSON from outside that could not be stored or shown.

JSON can hold half of a character, `"\ud800"`: a lone surrogate. Python parses it, but UTF-8 cannot encode it, so no
file, no database and no HTTP response can hold it.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import SerializerFunctionWrapHandler, TypeAdapter, model_serializer

_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def without_surrogates(text: str) -> str:
    """The text with U+FFFD, the replacement character, in place of each lone surrogate."""
    return _SURROGATE.sub(_REPLACEMENT, text)


def has_surrogates(text: str) -> bool:
    """Whether the text holds a lone surrogate."""
    return _SURROGATE.search(text) is not None


def nests_deeper(value: Any, levels: int) -> bool:
    """Whether JSON data nests lists and objects more than `levels` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [inner for each in level for inner in _held(each)]
        if not level:
            return False
    return True


def _held(value: Any) -> Iterable[Any]:
    """The values in a list or object; none for any other value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]")
"""Matches a letter of Japanese, Chinese or Thai, which are written without spaces between words."""


@lru_cache(maxsize=512)
def normal(text: str) -> str:
    """The text in a form for comparing phrases: letters and digits only, in lower case and in one spelling of each
    (NFKC), with single spaces between words, or none in scripts without spaces. Invisible characters are left out."""
    kept = unicodedata.normalize("NFKC", without_invisible(text).casefold())
    letters = [each if each.isalnum() or unicodedata.category(each)[0] == "M" else " " for each in kept]
    plain = " ".join("".join(letters).replace("_", " ").split())
    return plain.replace(" ", "") if UNSPACED.search(plain) else plain


_FILLERS = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0")
"""Characters without a shape that Unicode counts as letters, marks or symbols."""


def without_invisible(text: str) -> str:
    """The text without characters that nobody sees: joiners, direction marks, soft hyphens, variation selectors."""
    if text.isascii():
        return text
    return "".join(each for each in text if not _is_invisible(each))


def _is_invisible(letter: str) -> bool:
    return unicodedata.category(letter) == "Cf" or letter in _FILLERS or "\ufe00" <= letter <= "\ufe0f"


T = TypeVar("T", bound=type)


def left_out_when_empty(*names: str) -> Callable[[T], T]:
    """Decorates a dataclass: pydantic writes it without these fields where they are empty. They need a default, which
    they have again when they are read."""

    def decorate(kind: T) -> T:
        def written(self: Any, handler: SerializerFunctionWrapHandler) -> Any:
            fields = handler(self)
            return {name: value for name, value in fields.items() if value or name not in names}

        kind._written = model_serializer(mode="wrap")(written)
        kind.__pydantic_serializer__ = TypeAdapter(kind).serializer  # `to_jsonable_python` asks the class for it
        return kind

    return decorate
