"""Disguises of an answer: ways to write it that a student can still read."""

import base64
import random
import string
from collections.abc import Callable
from urllib.parse import quote

_LATIN, _CYRILLIC = "aceopxyiACEOPXTHMKB", "асеорхуіАСЕОРХТНМКВ"
_LOOK_ALIKES = str.maketrans(_LATIN + _CYRILLIC, _CYRILLIC + _LATIN)
"""Swaps Latin letters with Cyrillic ones that look the same."""


def capitals(text: str) -> str:
    """In capital letters: BOILED."""
    return text.upper()


def in_brackets(text: str) -> str:
    """In brackets: (boiled)."""
    return f"({text})"


def spelt(text: str) -> str:
    """With hyphens between the letters: b-o-i-l-e-d."""
    return " ".join("-".join(word) for word in text.split())


def spaced(text: str) -> str:
    """With spaces between the letters: b o i l e d."""
    return " ".join(text.replace(" ", ""))


def reversed_letters(text: str) -> str:
    """Backwards: deliob."""
    return text[::-1]


def zero_width(text: str, start: int = 0) -> str:
    """With invisible characters between the letters, the first one after letter number `start`."""
    return text[: start + 1] + "\u200d".join(text[start + 1 :])


def homoglyphs(text: str, most: int = 10**6) -> str:
    """With look-alikes (Cyrillic for Latin, Latin for Cyrillic) in place of the first `most` letters that have one."""
    changed = []
    for letter in text:
        look_alike = letter.translate(_LOOK_ALIKES)
        most -= look_alike != letter
        changed.append(look_alike if most >= 0 else letter)
    return "".join(changed)


def full_width(text: str, most: int = 10**6) -> str:
    """With full-width letters, as in East Asian typography, in place of the first `most` Latin ones."""
    changed = []
    for letter in text:
        plain = "!" <= letter <= "~" and letter.isalnum()
        most -= plain
        # Full-width forms are at a constant distance from ASCII in Unicode.
        changed.append(chr(ord(letter) + 0xFEE0) if plain and most >= 0 else letter)
    return "".join(changed)


def in_a_comment(text: str) -> str:
    """In an HTML comment: <!-- boiled -->."""
    return f"<!-- {text} -->"


def with_dots(text: str) -> str:
    """With dots after every second letter: bo.il.ed."""
    return ".".join(text[index : index + 2] for index in range(0, len(text), 2))


def words_joined(text: str) -> str:
    """Without spaces: iboiledanegg."""
    return text.replace(" ", "")


def words_reversed(text: str) -> str:
    """Each word backwards: I deliob na gge."""
    return " ".join(word[::-1] for word in text.split())


def words_shuffled(text: str) -> str:
    """The words in another order: egg boiled I an."""
    words = text.split()
    random.Random(text).shuffle(words)
    return " ".join(words)


def with_filler_words(text: str) -> str:
    """A filler after each word: I um boiled um an um egg um."""
    return " ".join(f"{word} um" for word in text.split())


def with_filler_letters(text: str) -> str:
    """A filler after each letter: bqoqiqlqeqdq."""
    return "".join(f"{letter}q" if letter.isalpha() else letter for letter in text)


def rotated(text: str) -> str:
    """Each letter moved by 13 places in the alphabet: obvyrq."""
    letters, capitals_ = string.ascii_lowercase, string.ascii_uppercase
    return text.translate(
        str.maketrans(letters + capitals_, letters[13:] + letters[:13] + capitals_[13:] + capitals_[:13])
    )


def in_leet(text: str) -> str:
    """With digits for letters: b01l3d."""
    return text.translate(str.maketrans("aeiostAEIOST", "431057431057"))


def in_base64(text: str) -> str:
    """In base 64: Ym9pbGVk."""
    return base64.b64encode(text.encode()).decode()


def in_hex(text: str) -> str:
    """In hexadecimal: 626f696c6564."""
    return text.encode().hex()


def as_a_url(text: str) -> str:
    """As in a URL: %62%6F%69%6C%65%64."""
    return "".join(quote(letter, safe="") if not letter.isascii() else f"%{ord(letter):02X}" for letter in text)


def in_spelling_alphabet(text: str) -> str:
    """In a spelling alphabet, as far as there is a word: bravo oscar india lima echo delta."""
    words = (
        "alfa bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec "
        "romeo sierra tango uniform victor whiskey xray yankee zulu"
    )
    names = dict(zip(string.ascii_lowercase, words.split(), strict=True))
    return " ".join(names.get(letter, letter) for letter in text.lower() if letter.isalnum())


def without_vowels(text: str) -> str:
    """Without vowels: bld."""
    return "".join(letter for letter in text if letter not in "aeiouyAEIOUY")


def with_a_blank(text: str) -> str:
    """With a mark in place of a letter in the middle of each longer word: bo_led."""
    return " ".join(f"{word[:2]}_{word[3:]}" if len(word) > 4 else word for word in text.split())


DISGUISES: dict[str, Callable[[str], str]] = {
    disguise.__name__: disguise
    for disguise in (
        *(capitals, in_brackets, spelt, spaced, reversed_letters),
        *(zero_width, homoglyphs, full_width, in_a_comment, with_dots, words_joined, words_reversed, words_shuffled),
        *(with_filler_words, with_filler_letters, rotated, in_leet, in_base64, in_hex, as_a_url, in_spelling_alphabet),
        *(without_vowels, with_a_blank),
    )
}
"""All disguises by name."""
