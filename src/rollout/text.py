"""Text and JSON from outside: what of it cannot be kept or shown.

JSON can spell half of a character, `"\\ud800"`: a lone surrogate. Python reads it, but UTF-8 cannot hold it, and so no
file, no database and no answer over HTTP can.
"""

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def without_surrogates(text: str) -> str:
    """The text with U+FFFD, the character for what cannot be read, in place of each lone surrogate."""
    return _SURROGATE.sub(_REPLACEMENT, text)


def has_surrogates(text: str) -> bool:
    """Whether the text holds a lone surrogate."""
    return _SURROGATE.search(text) is not None


def nests_deeper(value: Any, levels: int) -> bool:
    """Whether JSON data holds lists and objects within each other on more than so many levels."""
    level = [value]
    for _ in range(levels + 1):
        level = [inner for each in level for inner in _held(each)]
        if not level:
            return False
    return True


def _held(value: Any) -> Iterable[Any]:
    """What a list or an object holds; nothing for any other value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]")


@lru_cache(maxsize=512)
def normal(text: str) -> str:
    """Letters and digits alone, in lower case, words apart by one space: what two spellings of a phrase share."""
    letters = [each if each.isalnum() or unicodedata.category(each)[0] == "M" else " " for each in text.casefold()]
    plain = " ".join("".join(letters).replace("_", " ").split())
    return plain.replace(" ", "") if UNSPACED.search(plain) else plain
