"""Grading of maths answers: the boxed answer of a solution against the reference."""

import re
from fractions import Fraction

_BOXED = re.compile(r"\\boxed\s*\{")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)(?:/[+-]?\d+)?", re.ASCII)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}")


def extract_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` in the text, braces inside it balanced; None if there is none."""
    found = None
    for match in _BOXED.finditer(text):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                found = text[match.end() : position]
                break
    return found


def is_correct(solution: str, answer: str) -> bool:
    """Whether the solution's boxed answer equals the reference, as a number where both are numbers, else as text."""
    boxed = extract_boxed(solution)
    if boxed is None:
        return False
    given, wanted = _normalise(boxed), _normalise(answer)
    given_number, wanted_number = _as_number(given), _as_number(wanted)
    if given_number is not None and wanted_number is not None:
        return given_number == wanted_number
    return given == wanted


def _normalise(answer: str) -> str:
    answer = extract_boxed(answer) or answer
    answer = answer.strip().strip("$").rstrip(".")
    answer = re.sub(r"\\(?:left|right|,|;|!)", "", answer)
    return re.sub(r"\s+", "", answer)


def _as_number(answer: str) -> Fraction | None:
    answer = _LATEX_FRACTION.sub(r"\1/\2", answer)
    if _THOUSANDS.fullmatch(answer):  # "1,234" is a number, "1,2" is a pair
        answer = answer.replace(",", "")
    if len(answer) > 64 or not _NUMBER.fullmatch(answer):
        return None
    numerator, _, denominator = answer.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / Fraction(denominator or 1)
