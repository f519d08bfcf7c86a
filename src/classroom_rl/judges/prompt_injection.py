"""Finds what no message of a tutor may hold, whatever the lesson, such as another speaker's part; and undoes disguises
of a text: what a person or a model still reads, and a comparison of texts does not.

The disguises are invisible characters, letters and question marks of other scripts that look the same, letters of
another width, letters set apart ("b-o-i-l-e-d"), and texts written backwards.
"""

import re
import unicodedata
from functools import lru_cache

from classroom_rl.rollout.text import normal, without_invisible
from classroom_rl.rollout.thoughts import visible_text

_QUESTION_MARKS = str.maketrans(dict.fromkeys("\u037e\u061f\u2e2e\u2753\u2754", "?"))
"""The Greek, the Arabic and the reversed question mark, and the pictures of one."""

_LOOK_ALIKES = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u04bb\u0501\u051b\u051d"  # Cyrillic
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0406\u0408\u0405"
    "\u03bf\u03b1\u03bd\u03b9\u03c1\u03c5\u03f2"  # Greek
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7",
    "aeopcyxijshdqwABEKMHOPCTYXIJSoavipucABEZHIKMNOPTYX",
)
"""Letters that look like Latin ones, and these. After Unicode's table of confusable characters (UTS 39)."""

_WORD = re.compile(r"\w+")
_LATIN_LETTER = re.compile("[a-zA-Z]")
_INSIDE = re.compile(r"(?<![-._*·•|/\\~+])[-._*·•|/\\~+]+(?=\w)")
"""Marks that set the letters of a word apart; behind a mark that ends a sentence stands a space."""

_SPELT_OUT = re.compile(r"(?<!\w)\w(?:\W{1,3}\w(?!\w)){4,}")
"""At least five letters in a row that stand alone."""

_LONG_ENOUGH = 5
"""Letters. A shorter text may stand in another one, read backwards, by chance."""


@lru_cache(maxsize=1024)
def undisguised(text: str) -> str:
    """The text with everything as it looks: without invisible characters, with letters of the usual width, with "?" for
    marks that look like one or mean it, and with Latin letters in words that mix them with look-alikes."""
    if text.isascii():
        return text
    plain = unicodedata.normalize("NFKC", without_invisible(text).translate(_QUESTION_MARKS))
    return _WORD.sub(lambda word: _as_latin(word[0]) if _LATIN_LETTER.search(word[0]) else word[0], plain)


def _as_latin(text: str) -> str:
    return text.translate(_LOOK_ALIKES)


@lru_cache(maxsize=1024)
def readings(text: str) -> tuple[str, ...]:
    """The ways to read a text forwards: as it looks, with all look-alikes as Latin letters, and with letters that are
    set apart put together."""
    plain = undisguised(text)
    together = _INSIDE.sub("", _as_latin(plain))
    return tuple(dict.fromkeys((plain, _as_latin(plain), together)))


def backwards(text: str) -> tuple[str, ...]:
    """The `readings` of a text from its end to its beginning."""
    return tuple(each[::-1] for each in readings(text))


def hides(text: str, phrase: str) -> bool:
    """Whether a text holds a phrase in a disguise: letter by letter, or backwards. Phrases of fewer than five letters
    are not looked for."""
    wanted = normal(phrase).replace(" ", "")
    if len(wanted) < _LONG_ENOUGH:
        return False
    letters = [normal(_as_latin(each)).replace(" ", "") for each in _SPELT_OUT.findall(undisguised(text))]
    if any(wanted in each or wanted[::-1] in each for each in letters):
        return True
    return any(_stands_in(normal(each), normal(phrase)) for each in backwards(text))


def _stands_in(text: str, phrase: str) -> bool:
    return f" {phrase} " in f" {text} "


MOST_WORDS = 200
"""A message with more words is no message of a dialogue. The language tutor's prompt allows 60."""

MOST_CHARACTERS = 1500
"""The same bound for languages that are written without spaces."""

_ROLES = "student|pupil|learner|teacher|tutor|user|assistant|system|human|judge|evaluator|grader"
_MARKUP = re.compile(
    rf"<\||\|>|<!--|(?:^|\n)[^\S\n]*[*_#>\[(]*[^\S\n]*(?:{_ROLES})[^\S\n]*[\])*_]*[^\S\n]*:|"
    rf"\[/?[^\S\n]*(?:{_ROLES}|inst)[^\S\n]*\]|"
    rf"</?(?:{_ROLES}|conversation|dialogue|transcript|message|turn|verdict|instructions?|prompt)\b[^<>\n]{{0,80}}>",
    re.IGNORECASE,
)
_TO_JUDGE = re.compile(
    r"\b(?:ignore|disregard|forget)\b[^.!?\n]{0,40}\b(?:rules|instructions|criteria|prompt)\b|"
    r"\b(?:to|dear) (?:the )?(?:judge|evaluator|grader)\b|_(?:score|reasoning)\b|\"decision\"|"
    r"\b(?:full|highest|maximum|top) (?:scores?|marks)\b|"
    r"\b(?:rate|score|grade)\b[^.!?\n]{0,40}\b(?:1[.,]0\b|10 out of 10|10\s?/\s?10)|"
    r"\b(?:each|every|all|both|the|your) (?:\w+ )?criteri(?:on|a)\b",
    re.IGNORECASE,
)


def find_injection(text: str) -> str:
    """Why nothing in a teacher's message counts; empty if it may count."""
    shown = visible_text(text)
    if len(shown.split()) > MOST_WORDS or len(shown) > MOST_CHARACTERS:
        return f"writes {len(shown.split())} words"
    for each in readings(shown):
        if found := _MARKUP.search(each):
            return f"writes somebody else's part ({_quote(found[0])})"
        if found := _TO_JUDGE.search(each):
            return f"speaks to whoever judges ({_quote(found[0])})"
    return ""


def _quote(text: str, limit: int = 60) -> str:
    return f"“{text.strip()[:limit]}”"
