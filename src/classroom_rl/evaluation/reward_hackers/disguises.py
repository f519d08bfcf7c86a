"""Ways to write a text such that a reader understands it and a comparison of texts does not find it."""

from collections.abc import Callable

_LATIN, _CYRILLIC = "aceopxyiACEOPXTHMKB", "асеорхуіАСЕОРХТНМКВ"
_LOOK_ALIKES = str.maketrans(_LATIN + _CYRILLIC, _CYRILLIC + _LATIN)
"""Latin letters, and Cyrillic ones that look the same: each in place of the other."""


def capitals(text: str) -> str:
    """BOILED"""
    return text.upper()


def in_brackets(text: str) -> str:
    """(boiled)"""
    return f"({text})"


def spelt(text: str) -> str:
    """b-o-i-l-e-d"""
    return " ".join("-".join(word) for word in text.split())


def spaced(text: str) -> str:
    """b o i l e d"""
    return " ".join(text.replace(" ", ""))


def reversed_letters(text: str) -> str:
    """deliob"""
    return text[::-1]


def zero_width(text: str, start: int = 0) -> str:
    """Invisible characters between letters, the first after letter number `start`."""
    return text[: start + 1] + "\u200d".join(text[start + 1 :])


def homoglyphs(text: str, most: int = 10**6) -> str:
    """Look-alikes, Cyrillic for Latin and Latin for Cyrillic, in place of the first `most` letters that have one."""
    changed = []
    for letter in text:
        other = letter.translate(_LOOK_ALIKES)
        most -= other != letter
        changed.append(other if most >= 0 else letter)
    return "".join(changed)


def full_width(text: str, most: int = 10**6) -> str:
    """The letters of East Asian typography in place of the first `most` Latin ones."""
    changed = []
    for letter in text:
        plain = "!" <= letter <= "~" and letter.isalnum()
        most -= plain
        changed.append(chr(ord(letter) + 0xFEE0) if plain and most >= 0 else letter)
    return "".join(changed)


def in_a_comment(text: str) -> str:
    """<!-- boiled -->"""
    return f"<!-- {text} -->"


def with_dots(text: str) -> str:
    """bo.il.ed"""
    return ".".join(text[place : place + 2] for place in range(0, len(text), 2))


DISGUISES: dict[str, Callable[[str], str]] = {
    each.__name__: each
    for each in (
        *(capitals, in_brackets, spelt, spaced, reversed_letters),
        *(zero_width, homoglyphs, full_width, in_a_comment, with_dots),
    )
}
