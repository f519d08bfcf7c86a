"""Finds the JSON object in a model's answer, and repairs what models get wrong in it.

An answer may quote somebody who gains from what is read: the tutor. So nothing is read that can be read in two ways.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from classroom_rl.errors import JudgeOutputError
from classroom_rl.rollout.text import nests_deeper, without_surrogates

_COMMA_OR_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?|[{\[]\s*,|,(?=\s*[}\]])', re.DOTALL)
_MOST_LEVELS = 50
_MOST_CHARACTERS, _MOST_REPAIRS, _MOST_OBJECTS, _MOST_BROKEN = 100_000, 20, 20, 1_000
_TRAILING_COMMA = re.compile(r",\s*[}\]]")
_INVALID_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_OBJECT_BEGINS, _TWO_BRACES = re.compile(r'\{\s*"'), re.compile(r"\{\s*\{")
_KEY, _MEMBER = re.compile(r'"(\w+)"\s*:'), re.compile(r'[{,]\s*"(\w+)"\s*:\s*')
_KEY_OUTSIDE = re.compile(r"""["'](\w+)["']\s*:|[{,]\s*(\w+)\s*:""")
_HERE = "\0"
_OBJECT_ENDS = re.compile(r"""["']\s*\}""")
_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_LAST_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*(")\s*(?:,\s*)?\}')


def find_object(text: str) -> dict[str, Any]:
    """The one JSON object at the top level of the text, after a reasoning model's thoughts; equal objects count once.

    Two faults that judges make when they quote somebody are repaired: invalid escapes (LaTeX's `\\(`), and quotes that
    are not escaped. An object inside something that cannot be read is not taken: it may be what the judge quotes.

    Raises:
        JudgeOutputError: if there is no object, or several different ones, or text outside of it that says something
            else of its keys, or if the answer is too long or too broken to parse.
    """
    answer = _without_thoughts(text)
    if len(answer) > _MOST_CHARACTERS:
        length = f"{len(answer)} characters long; {_MOST_CHARACTERS} are read at most"
        raise JudgeOutputError(f"The judge's answer is {length}: {quote(text)}")
    try:
        found, outside = _scan(_INVALID_ESCAPE.sub(_escaped, answer))
    except _TooManyBraces as error:
        what = f"more than {_MOST_BROKEN} braces that open no JSON object"
        raise JudgeOutputError(f"The judge's answer holds {what}: {quote(text)}") from error
    except (RecursionError, _TooDeep) as error:
        raise JudgeOutputError(f"The judge's answer nests too deep to be read: {quote(text)}") from error
    except _TooManyRepairs as error:
        what = f"more than {_MOST_REPAIRS} objects that need a repair"
        raise JudgeOutputError(f"The judge's answer holds {what}: {quote(text)}") from error
    except _AmbiguousKey as error:
        key = without_surrogates(error.args[0][:100])
        raise JudgeOutputError(f"The judge's answer says two things of {key}: {quote(text)}") from error
    except _Unreadable as error:
        why = f"no JSON object that can be read ({error})"
        raise JudgeOutputError(f"The judge's answer holds {why}: {quote(text)}") from error
    if len(found) != 1:
        what = "no JSON object" if not found else f"{len(found)} different JSON objects"
        raise JudgeOutputError(f"The judge's answer holds {what}: {quote(text)}")
    again = next((name for pair in _KEY_OUTSIDE.findall(outside) for name in pair if name in found[0]), None)
    if again is not None or _OBJECT_ENDS.search(outside.partition(_HERE)[2]):
        what = f"names {again}" if again is not None else "goes on like JSON"
        raise JudgeOutputError(f"The judge's answer {what} outside of its JSON object, too: {quote(text)}")
    return found[0]


def _without_thoughts(text: str) -> str:
    """The text after the thoughts that it begins with."""
    if not text.lstrip().startswith("<think>"):
        return text
    _, ended, answer = text.partition("</think>")
    if not ended:
        raise JudgeOutputError(f"The judge's answer holds no JSON object, only thoughts without an end: {quote(text)}")
    return answer


def _scan(answer: str) -> tuple[list[dict[str, Any]], str]:
    """The different objects at the top level, and the text outside of them, with `_HERE` in their places.

    A template may have opened the thoughts, so nothing before a `</think>` outside of the objects needs to be JSON. But
    an object before it counts: the judge may quote a tutor that writes `</think>`.
    """
    found: list[dict[str, Any]] = []
    outside, unreadable, opened = "", "", 0
    position, broken, repairs = 0, 0, iter(range(_MOST_REPAIRS))
    while len(found) < _MOST_OBJECTS:
        brace = answer.find("{", position)
        between = answer[position:] if brace < 0 else answer[position:brace]
        if "</think>" in between:
            between, outside, unreadable, opened = between.rsplit("</think>", 1)[1], _HERE if found else "", "", 0
        outside += between
        opened = max(0, opened - between.count("}"))
        if brace < 0:
            break
        try:
            value, answer, position = _decode(answer, brace, repairs)
        except ValueError as error:  # not JSON, or an integer of thousands of digits
            position, broken = brace + 1, broken + 1
            if broken > _MOST_BROKEN:
                raise _TooManyBraces from error
            if _OBJECT_BEGINS.match(answer, brace):
                unreadable = unreadable or f"{error}"[:200]
            opened += not _TWO_BRACES.match(answer, brace)
            outside += "{"
            continue
        if opened and not unreadable:
            unreadable = "one stands inside of braces that are no JSON"
        outside += _HERE
        if value not in found:
            found.append(value)
    if unreadable:
        raise _Unreadable(unreadable)
    return found, outside


class _AmbiguousKey(Exception):
    """An object has a key twice, with different values."""


class _TooManyRepairs(Exception):
    """Too many objects of an answer need a repair; each repair reads the rest of the text."""


class _TooManyBraces(Exception):
    """Too many braces of an answer open no object; each may be read to the end of the text."""


class _TooDeep(Exception):
    """An object is nested deeper than a judge's answer needs; showing or comparing it could fail."""


class _Unreadable(Exception):
    """Something at the top level is written like an object, and is none."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise _AmbiguousKey(key)
        found[key] = value
    return found


def _decode(text: str, start: int, repairs: Iterator[int]) -> tuple[dict[str, Any], str, int]:
    """The object that starts at `start`, the text as it was read, and the position after the object in it. Line breaks
    in strings and commas before a closing bracket are accepted, because judges write both, and so are quotes that are
    not escaped.

    Args:
        repairs: each object with such a comma or quote consumes one item.

    Raises:
        ValueError: if no object starts there.
        _TooManyRepairs: if `repairs` is used up.
    """
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_object)
    read, commas, quotes = text, False, False
    while True:
        try:
            value, end = decoder.raw_decode(read, start)
            break
        except json.JSONDecodeError as error:
            comma = read.rfind(",", start, error.pos + 1)
            has_comma = comma >= 0 and not read[comma + 1 : error.pos].strip() and _TRAILING_COMMA.match(read, comma)
            repairs_commas = has_comma and not commas
            if not repairs_commas and (quotes or not _OBJECT_BEGINS.match(text, start)):
                raise
            if next(repairs, None) is None:
                raise _TooManyRepairs from error
            if repairs_commas:
                read, commas = _without_trailing_commas(read, start), True
            else:
                read = text = _with_escaped_quotes(text, start)
                commas, quotes = False, True
    if nests_deeper(value, _MOST_LEVELS):
        raise _TooDeep
    return value, text, end


def _escaped(found: re.Match[str]) -> str:
    return "\\\\" if found[0] == "\\" else found[0]


def _with_escaped_quotes(text: str, start: int) -> str:
    """The text with a backslash before each quote inside of the string values of the object that begins at `start`.

    A value ends before the next key of the object, the last one before a closing brace. So no key of the object may
    stand a second time in the rest of the text, in what the judge quotes or after it.

    Raises:
        ValueError: if one does, or if the last value has no end.
    """
    rest = text[start:]
    begun = [member for member in _MEMBER.finditer(rest) if member.start() == 0 or member[0][0] == ","]
    members = begun[:1]
    for member in begun[1:]:  # a key inside of a string follows no end of a string
        value = rest[members[-1].end() : member.start()].rstrip()
        if value[:1] != '"' or len(value) > 1 and _ends_string(value):
            members.append(member)
    written = Counter(_KEY.findall(rest))
    repeated = next((member[1] for member in members if written[member[1]] > 1), None)
    if repeated is not None:
        raise ValueError(f"quotes in it are not escaped, and {repeated} stands in it twice")
    parts, position = [], 0
    for number, member in enumerate(members, start=1):
        if rest[member.end() : member.end() + 1] != '"':
            continue
        first, ends = member.end() + 1, []
        if number == len(members) and not (ends := list(_LAST_QUOTE.finditer(rest, first))):
            raise ValueError(f"{member[1]} has no end")
        last = ends[-1].start(1) if ends else rest.rindex('"', first, members[number].start())
        parts += [rest[position:first], _QUOTE.sub(lambda each: '\\"' if each[0] == '"' else each[0], rest[first:last])]
        position = last
    return text[:start] + "".join(parts) + rest[position:]


def _ends_string(text: str) -> bool:
    """Whether the text ends with a quote that is not escaped."""
    before = text[:-1]
    return text.endswith('"') and (len(before) - len(before.rstrip("\\"))) % 2 == 0


def _without_trailing_commas(text: str, start: int) -> str:
    """The text with a space in place of each comma, from `start` on, between a value and a closing bracket. Commas in
    strings, and commas without a value before them, stay."""
    kept = _COMMA_OR_STRING.sub(lambda found: " " if found[0] == "," else found[0], text[start:])
    return text[:start] + kept


def quote(said: Any, limit: int = 400) -> str:
    """What a judge said, cut to `limit` characters, for a message."""
    text = said if isinstance(said, str) else repr(said)
    shown = text if len(text) <= limit else f"{text[:limit]} …"
    return repr(shown) if isinstance(said, str) else shown
