"""Cleans text and JSON from outside that could not be stored or shown.

JSON can hold half of a character, `"\ud800"`: a lone surrogate. Python parses it, but UTF-8 cannot encode it, so it
fits into no file, no database and no HTTP response.
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
        level = [inner for outer in level for inner in _values_in(outer)]
        if not level:
            return False
    return True


def _values_in(value: Any) -> Iterable[Any]:
    """The values in a list or object; none for any other value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]")
"""Matches a letter of Japanese, Chinese or Thai, which are written without spaces between words."""


@lru_cache(maxsize=512)
def normal(text: str) -> str:
    """The text normalised for comparing phrases: only letters and digits, in lower case and in Unicode's NFKC form,
    with single spaces between words, or none in scripts without spaces. Invisible characters are left out."""
    folded = unicodedata.normalize("NFKC", without_invisible(text).casefold())
    # Marks (category M) are kept: Thai and others write vowels as marks.
    letters = [letter if letter.isalnum() or unicodedata.category(letter)[0] == "M" else " " for letter in folded]
    normalised = " ".join("".join(letters).replace("_", " ").split())
    return normalised.replace(" ", "") if UNSPACED.search(normalised) else normalised


_FILLERS = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0")
"""Invisible characters that Unicode counts as letters, marks or symbols."""


def without_invisible(text: str) -> str:
    """The text without invisible characters: joiners, direction marks, soft hyphens, variation selectors."""
    if text.isascii():
        return text
    return "".join(letter for letter in text if not _is_invisible(letter))


def _is_invisible(letter: str) -> bool:
    return unicodedata.category(letter) == "Cf" or letter in _FILLERS or "\ufe00" <= letter <= "\ufe0f"


T = TypeVar("T", bound=type)


def left_out_when_empty(*names: str) -> Callable[[T], T]:
    """Decorates a dataclass: pydantic serialises it without these fields where they are empty. They need a default,
    which is used when the object is parsed again."""

    def decorate(cls: T) -> T:
        def serialised(self: Any, handler: SerializerFunctionWrapHandler) -> Any:
            fields = handler(self)
            return {name: value for name, value in fields.items() if value or name not in names}

        cls._serialised = model_serializer(mode="wrap")(serialised)
        cls.__pydantic_serializer__ = TypeAdapter(cls).serializer  # `to_jsonable_python` looks it up on the class
        return cls

    return decorate
