"""Extracts the JSON object from a judge model's answer, and repairs common mistakes in it.

An answer may quote the tutor, who gains from a wrong parse. So an answer that can be parsed in two ways is refused.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from classroom_rl.errors import JudgeOutputError
from classroom_rl.rollout.text import nests_deeper, without_surrogates

_NUMBER = re.compile(r"\s*[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?\s*", re.ASCII)
_COMMA_OR_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?|[{\[]\s*,|,(?=\s*[}\]])', re.DOTALL)
_MOST_LEVELS = 50
_MOST_CHARACTERS, _MOST_REPAIRS, _MOST_OBJECTS, _MOST_BROKEN = 100_000, 20, 20, 1_000
_TRAILING_COMMA = re.compile(r",\s*[}\]]")
_INVALID_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_OBJECT_BEGINS, _TWO_BRACES = re.compile(r'\{\s*"'), re.compile(r"\{\s*\{")
_KEY, _MEMBER = re.compile(r'"(\w+)"\s*:'), re.compile(r'[{,]\s*"(\w+)"\s*:\s*')
_KEY_OUTSIDE = re.compile(r"""["'](\w+)["']\s*:|[{,]\s*(\w+)\s*:""")
_OBJECT_MARK = "\0"
"""Stands for an object in the text outside of the objects."""

_OBJECT_ENDS = re.compile(r"""["']\s*\}""")
_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_LAST_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*(")\s*(?:,\s*)?\}')


def find_object(text: str) -> dict[str, Any]:
    """The only JSON object at the top level of the text, after the thoughts of a reasoning model. Equal objects count
    once.

    Two mistakes that judges make in quotations are repaired: invalid escapes (LaTeX's `\\(`) and unescaped quotes. An
    object inside a broken one is not accepted: it may be part of what the judge quotes.

    Raises:
        JudgeOutputError: if there is no object, if there are several different ones, if the text outside of the object
            also names one of its keys, or if the answer is too long or too broken to parse.
    """
    answer = _without_thoughts(text)
    if len(answer) > _MOST_CHARACTERS:
        length = f"{len(answer)} characters long; {_MOST_CHARACTERS} are read at most"
        raise JudgeOutputError(f"The judge's answer is {length}: {quote(text)}")
    try:
        objects, outside = _scan(_INVALID_ESCAPE.sub(_escaped, answer))
    except _TooManyBraces as error:
        problem = f"more than {_MOST_BROKEN} braces that open no JSON object"
        raise JudgeOutputError(f"The judge's answer holds {problem}: {quote(text)}") from error
    except (RecursionError, _TooDeep) as error:
        raise JudgeOutputError(f"The judge's answer nests too deep to be read: {quote(text)}") from error
    except _TooManyRepairs as error:
        problem = f"more than {_MOST_REPAIRS} objects that need a repair"
        raise JudgeOutputError(f"The judge's answer holds {problem}: {quote(text)}") from error
    except _AmbiguousKey as error:
        key = without_surrogates(error.args[0][:100])
        raise JudgeOutputError(f"The judge's answer says two things of {key}: {quote(text)}") from error
    except _Unreadable as error:
        reason = f"no JSON object that can be read ({error})"
        raise JudgeOutputError(f"The judge's answer holds {reason}: {quote(text)}") from error
    if len(objects) != 1:
        problem = "no JSON object" if not objects else f"{len(objects)} different JSON objects"
        raise JudgeOutputError(f"The judge's answer holds {problem}: {quote(text)}")
    repeated = next((name for groups in _KEY_OUTSIDE.findall(outside) for name in groups if name in objects[0]), None)
    if repeated is not None or _OBJECT_ENDS.search(outside.partition(_OBJECT_MARK)[2]):
        problem = f"names {repeated}" if repeated is not None else "goes on like JSON"
        raise JudgeOutputError(f"The judge's answer {problem} outside of its JSON object, too: {quote(text)}")
    return objects[0]


def _without_thoughts(text: str) -> str:
    """The text without the thoughts at its beginning.

    Raises:
        JudgeOutputError: if the thoughts have no end.
    """
    if not text.lstrip().startswith("<think>"):
        return text
    _, end_tag, answer = text.partition("</think>")
    if not end_tag:
        raise JudgeOutputError(f"The judge's answer holds no JSON object, only thoughts without an end: {quote(text)}")
    return answer


def _scan(answer: str) -> tuple[list[dict[str, Any]], str]:
    """The distinct objects at the top level, and the text outside of them, with `_OBJECT_MARK` in place of each object.

    A chat template may have opened the thoughts, so text before a `</think>` outside of the objects need not be JSON.
    An object before it still counts: the judge may quote a tutor that writes `</think>`.

    Raises:
        _Unreadable: if something at the top level begins like an object and cannot be parsed.
        _TooManyBraces, _TooManyRepairs, _TooDeep, _AmbiguousKey, RecursionError: if the answer is too broken.
    """
    objects: list[dict[str, Any]] = []
    outside, unreadable, open_braces = "", "", 0
    position, broken, repairs = 0, 0, iter(range(_MOST_REPAIRS))
    while len(objects) < _MOST_OBJECTS:
        brace = answer.find("{", position)
        between = answer[position:] if brace < 0 else answer[position:brace]
        if "</think>" in between:
            between = between.rsplit("</think>", 1)[1]
            outside, unreadable, open_braces = _OBJECT_MARK if objects else "", "", 0
        outside += between
        open_braces = max(0, open_braces - between.count("}"))
        if brace < 0:
            break
        try:
            value, answer, position = _decode(answer, brace, repairs)
        except ValueError as error:  # not JSON, or an integer of thousands of digits
            position, broken = brace + 1, broken + 1
            if broken > _MOST_BROKEN:
                raise _TooManyBraces from error
            if _OBJECT_BEGINS.match(answer, brace):  # remember the first error; it is raised at the end
                unreadable = unreadable or f"{error}"[:200]
            # Of two braces in a row only the second counts: prompt templates write "{{" for a single brace.
            open_braces += not _TWO_BRACES.match(answer, brace)
            outside += "{"
            continue
        if open_braces and not unreadable:
            unreadable = "one stands inside of braces that are no JSON"
        outside += _OBJECT_MARK
        if value not in objects:
            objects.append(value)
    if unreadable:
        raise _Unreadable(unreadable)
    return objects, outside


class _AmbiguousKey(Exception):
    """An object contains a key twice with different values."""


class _TooManyRepairs(Exception):
    """Too many objects of an answer need a repair. The number is limited, as each repair scans the rest of the text."""


class _TooManyBraces(Exception):
    """Too many braces of an answer open no object. The number is limited because the decoder may scan to the end of the
    text for each."""


class _TooDeep(Exception):
    """An object is nested deeper than a judge's answer needs. To print or compare it could raise `RecursionError`."""


class _Unreadable(Exception):
    """Text at the top level begins like an object, but cannot be parsed."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `json.JSONDecoder` that accepts a repeated key only with an equal value."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise _AmbiguousKey(key)
        result[key] = value
    return result


def _decode(text: str, start: int, repairs: Iterator[int]) -> tuple[dict[str, Any], str, int]:
    """Parse the object that starts at `start`. Line breaks in strings, trailing commas and unescaped quotes are
    accepted, because judges write all three.

    Args:
        repairs: an iterator with one item for each repair that is still allowed.

    Returns:
        The object, the text with its quotes escaped, and the position after the object in this text.

    Raises:
        ValueError: if no object starts there.
        _TooManyRepairs: if `repairs` is exhausted.
        _TooDeep: if the object is nested too deep.
    """
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_object)
    repaired, commas, quotes = text, False, False
    while True:
        try:
            value, end = decoder.raw_decode(repaired, start)
            break
        except json.JSONDecodeError as error:
            comma = repaired.rfind(",", start, error.pos + 1)
            follows_comma = comma >= 0 and not repaired[comma + 1 : error.pos].strip()
            repairs_commas = follows_comma and _TRAILING_COMMA.match(repaired, comma) and not commas
            if not repairs_commas and (quotes or not _OBJECT_BEGINS.match(text, start)):
                raise
            if next(repairs, None) is None:
                raise _TooManyRepairs from error
            if repairs_commas:
                repaired, commas = _without_trailing_commas(repaired, start), True
            else:
                repaired = text = _with_escaped_quotes(text, start)
                commas, quotes = False, True
    if nests_deeper(value, _MOST_LEVELS):
        raise _TooDeep
    return value, text, end


def _escaped(match: re.Match[str]) -> str:
    return "\\\\" if match[0] == "\\" else match[0]


def _with_escaped_quotes(text: str, start: int) -> str:
    """The text with a backslash before each unescaped quote in the string values of the object that begins at `start`.

    A value is taken to end before the next key of the object, and the last one before a closing brace. So no key of the
    object may occur a second time in the rest of the text, whether in a quotation of the judge or after the object.

    Raises:
        ValueError: if a key occurs twice, or if the last value has no end.
    """
    rest = text[start:]
    candidates = [member for member in _MEMBER.finditer(rest) if member.start() == 0 or member[0][0] == ","]
    members = candidates[:1]
    for member in candidates[1:]:  # what looks like a key inside a string does not follow the end of a string
        value = rest[members[-1].end() : member.start()].rstrip()
        if value[:1] != '"' or len(value) > 1 and _ends_string(value):
            members.append(member)
    key_counts = Counter(_KEY.findall(rest))
    repeated = next((member[1] for member in members if key_counts[member[1]] > 1), None)
    if repeated is not None:
        raise ValueError(f"quotes in it are not escaped, and {repeated} stands in it twice")
    parts, position = [], 0
    for number, member in enumerate(members, start=1):
        if rest[member.end() : member.end() + 1] != '"':  # not a string, so there is nothing to escape
            continue
        value_start, ends = member.end() + 1, []
        if number == len(members) and not (ends := list(_LAST_QUOTE.finditer(rest, value_start))):
            raise ValueError(f"{member[1]} has no end")
        value_end = ends[-1].start(1) if ends else rest.rindex('"', value_start, members[number].start())
        value = rest[value_start:value_end]
        parts += [rest[position:value_start], _QUOTE.sub(lambda match: '\\"' if match[0] == '"' else match[0], value)]
        position = value_end
    return text[:start] + "".join(parts) + rest[position:]


def _ends_string(text: str) -> bool:
    """Whether the text ends with a quote that is not escaped."""
    before = text[:-1]
    return text.endswith('"') and (len(before) - len(before.rstrip("\\"))) % 2 == 0


def _without_trailing_commas(text: str, start: int) -> str:
    """The text with a space in place of each trailing comma from `start` on, so that positions do not change. Commas in
    strings, and commas without a value before them, stay."""
    repaired = _COMMA_OR_STRING.sub(lambda match: " " if match[0] == "," else match[0], text[start:])
    return text[:start] + repaired


def number_in(value: Any) -> float:
    """The value of a JSON number, or of a number in a string; NaN for anything else."""
    if isinstance(value, bool) or not (
        isinstance(value, (int, float)) or isinstance(value, str) and _NUMBER.fullmatch(value)
    ):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def quote(value: Any, limit: int = 400) -> str:
    """A value from a judge's answer as text for an error message, cut to `limit` characters."""
    text = value if isinstance(value, str) else repr(value)
    shortened = text if len(text) <= limit else f"{text[:limit]} …"
    return repr(shortened) if isinstance(value, str) else shortened
