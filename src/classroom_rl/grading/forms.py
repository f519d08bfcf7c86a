"""Compares maths answers by their text, and prepares those that only a computer algebra system can compare.

Pure string processing, linear in the length of the text; it evaluates no expression.
"""

import re
from fractions import Fraction

LONGEST = 1000
"""In characters; longer answers are compared as text only."""

Pair = tuple[str, str]

_BOX_OR_BRACE = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|[{}]", re.DOTALL)
_SPACING = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|(?<!\\)\\[,;:! ]|~")
_THOUSANDS_SPACE = re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\}|~)+(?=\d{3}(?!\d))")
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degrees?(?![a-zA-Z]))")
_TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
_ONLY_TEXT = re.compile(_TEXT)
_TEXT_PAIR = re.compile(rf"{_TEXT}\s*(/?)\s*{_TEXT}")
_WORDS = re.compile(r"[A-Za-z .,'()-]*[A-Za-z]{4}[A-Za-z .,'()-]*")

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_COMMAS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{([+-]?\d+)\}\{([+-]?\d+)\}|([+-]?\d+)/([+-]?\d+)", re.ASCII)
_POWER_OF_TEN = re.compile(
    r"(.+?)(?:\\times|\\cdot|\*)10\^(?:\{([+-]?\d{1,3})\}|([+-]?\d{1,3}))|(.+?)[eE]([+-]?\d{1,3})"
)
_MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)/(\d+)", re.ASCII)
_REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{(\d+)\}|\((\d+)\))", re.ASCII)

_SPELLINGS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram kilo",
    "lb": "pound",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "mph": "",
    "°": "degree deg",
    "rad": "radian",
    "n": "newton",
    "j": "joule",
    "w": "watt",
    "kwh": "",
    "unit": "",
    "dollar": "$ usd",
    "cent": "",
    "euro": "€ eur",
    "£": "gbp",
    "%": "percent percentage pct",
}
_UNITS = {name: unit for unit, names in _SPELLINGS.items() for name in (unit, *names.split())}
_UNIT_NAMES = "|".join(sorted((f"{name}s?" for name in _UNITS if len(name) > 1 and name.isalpha()), key=len)[::-1])
_UNIT_IN_TEXT = re.compile(rf"(?P<value>.*\S)\s*{_TEXT}(?P<power>\s*\^\s*\{{?\d\}}?)?", re.DOTALL)
_UNIT_AFTER_NUMBER = re.compile(
    rf"(?P<value>.*[\d}})])(?:\s|\\ )*(?P<unit>\\?%|(?:sq(?:uare)?\.?\s|cubic\s)?(?:{_UNIT_NAMES})"
    rf"(?:\s*(?:/|per)\s*(?:{_UNIT_NAMES}|[smh])(?![a-z]))?)(?P<power>\s*\^\s*\{{?\d\}}?)?",
    re.DOTALL | re.IGNORECASE,
)
_CURRENCY = re.compile(r"([+-]?)\s*(\\\$|\$|€|£)\s*(?=[\d.])")


def extract_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` in the text, with balanced braces; None if there is none.

    The last one is the one that starts last, so of nested boxes the inner one counts.
    """
    content, content_start = None, -1
    open_braces: list[tuple[int, bool]] = []
    for token in _BOX_OR_BRACE.finditer(text):
        if token["box"] or token[0] == "{":
            open_braces.append((token.end(), bool(token["box"])))
        elif token[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and start > content_start:
                content, content_start = text[start : token.start()], start
    return content


def compare_as_text(answer: str, reference: str) -> bool | list[Pair]:
    """Whether an answer equals the reference, if their texts decide that. Otherwise pairs of LaTeX expressions: the
    answer is correct if the two expressions of any pair are equal.

    - Equal texts and equal plain numbers are correct; different plain decimals are wrong.
    - Words are compared as words, ignoring case: "Monday" is not a product of variables.
    - If both sides have a unit, the units must be the same (none is converted). A unit on one side only is ignored.
    - If only one side has a percent sign, it may be dropped or applied: 50 % equals 50 and 0.5.
    - A set in braces never equals a tuple or an interval.
    """
    answer, reference = _tidy(answer), _tidy(reference)
    if _without_spaces(answer) == _without_spaces(reference):
        return bool(_without_spaces(reference))
    if len(answer) > LONGEST or len(reference) > LONGEST:
        return False
    if _is_words(reference):
        return _letters(answer) == _letters(reference)
    (answer, answer_unit), (reference, reference_unit) = _split_unit(answer), _split_unit(reference)
    if answer_unit and reference_unit and answer_unit != reference_unit:
        return False
    if _is_set(answer) and _is_tuple(reference) or _is_tuple(answer) and _is_set(reference):
        return False
    pairs = [(answer, reference)]
    if answer_unit == "%" and reference_unit is None:
        pairs.append((_hundredth(answer), reference))
    elif reference_unit == "%" and answer_unit is None:
        pairs.append((answer, _hundredth(reference)))
    return _compare_numbers(pairs)


def _compare_numbers(pairs: list[Pair]) -> bool | list[Pair]:
    """True if the two sides of any pair are the same number. Otherwise the pairs that are still undecided, or False if
    there are none."""
    undecided = []
    for answer, reference in pairs:
        numbers = _as_number(answer), _as_number(reference)
        if None in numbers:
            undecided.append((_spell_out(answer), _spell_out(reference)))
        elif numbers[0] == numbers[1]:
            return True
        elif _is_fraction(answer) != _is_fraction(reference):  # 0.333333 may be a rounded 1/3
            undecided.append((answer, reference))
    return undecided or False


# Reading an answer ---------------------------------------------------------------------------------------------------


def _tidy(answer: str) -> str:
    """The answer without box, dollar signs, spacing commands and final full stop, with degree signs as a unit."""
    answer = (extract_boxed(answer) or answer).strip().removesuffix(".").strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if answer.startswith(left) and answer.endswith(right) and len(answer) > len(left + right):
            answer = answer[len(left) : -len(right)].strip()
    if len(answer) > LONGEST:
        return answer
    answer = _SPACING.sub(" ", _THOUSANDS_SPACE.sub("", answer)).replace("−", "-").replace("\\varnothing", "\\emptyset")
    answer = _DEGREE.sub(r"\\text{°}", _MIXED.sub(r"\1\\frac{\2}{\3}", answer))
    while (merged := _TEXT_PAIR.sub(r"\\text{\1\2\3}", answer)) != answer:
        answer = merged
    return answer.strip().removesuffix(".")


def _without_spaces(answer: str) -> str:
    """The answer without spaces, except those between two digits ("1 1/2" is not "11/2")."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", answer)


def _is_words(answer: str) -> bool:
    """Whether the answer is words and not a formula: all of it in \\text{…}, or without digits and symbols and with at
    least four letters in a row."""
    only_text = _ONLY_TEXT.fullmatch(answer)
    return bool(only_text and len(_letters(only_text[1])) > 1 or _WORDS.fullmatch(answer))


def _letters(answer: str) -> str:
    return "".join(
        character for character in _ONLY_TEXT.sub(r"\1", answer).casefold() if character.isalnum() or character == "-"
    )


def _is_set(answer: str) -> bool:
    return answer.startswith(("\\{", "\\lbrace")) and answer.endswith(("\\}", "\\rbrace"))


def _is_tuple(answer: str) -> bool:
    return answer.startswith(("(", "[")) and answer.endswith((")", "]")) and "," in answer


# Units ---------------------------------------------------------------------------------------------------------------


def _split_unit(answer: str) -> tuple[str, str | None]:
    """The answer without its unit, and the unit's normalised name; None if it has no unit."""
    if currency := _CURRENCY.match(answer):
        return currency[1] + answer[currency.end() :], _unit_name(currency[2])
    if match := _UNIT_IN_TEXT.fullmatch(answer):
        return match["value"], _unit_name(match[2] + (match["power"] or ""))
    if match := _UNIT_AFTER_NUMBER.fullmatch(answer):
        return match["value"], _unit_name(match["unit"] + (match["power"] or ""))
    return answer, None


def _unit_name(unit: str) -> str:
    """The normalised name of a unit: "square metres" is "m^2", "km per hour" is "km/h"."""
    unit = unit.casefold().replace("\\", "").replace("²", "^2").replace("³", "^3").replace(" per ", "/")
    unit, squares = re.subn(r"\b(?:square|sq)\b\.?\s*(.*)", r"\1^2", unit)
    if not squares:
        unit = re.sub(r"\bcubic\s*(.*)", r"\1^3", unit)
    parts = re.split(r"([/^*])", re.sub(r"[\s.{}]", "", unit))
    return "".join(_UNITS.get(part) or _UNITS.get(part.removesuffix("s"), part.removesuffix("s")) for part in parts)


def _hundredth(value: str) -> str:
    """The value divided by 100, as LaTeX."""
    number = _as_number(value)
    return rf"\frac{{{value}}}{{100}}" if number is None else _as_latex(number / 100)


# Numbers -------------------------------------------------------------------------------------------------------------


def _as_number(answer: str) -> Fraction | None:
    """The value of a plain number: an integer, decimal or fraction, also with commas between thousands or times a power
    of ten. None for anything else."""
    answer = _without_spaces(answer)
    if len(answer) > 64:  # a bound on the size of the numbers that a model's text can make this compute with
        return None
    if power := _POWER_OF_TEN.fullmatch(answer):
        mantissa = _as_number(power[1] or power[4])
        return None if mantissa is None else mantissa * Fraction(10) ** int(power[2] or power[3] or power[5])
    if _COMMAS.fullmatch(answer):  # "1,234" is a number, "1,2" is a pair
        return Fraction(answer.replace(",", ""))
    if _NUMBER.fullmatch(answer):
        return Fraction(answer.rstrip(".") or "0")
    if fraction := _FRACTION.fullmatch(answer):
        sign = -1 if fraction[1] == "-" else 1
        numerator, denominator = int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5])
        return None if denominator == 0 else sign * Fraction(numerator, denominator)
    return None


def _is_fraction(answer: str) -> bool:
    return "frac" in answer or "/" in answer


def _spell_out(answer: str) -> str:
    """The answer with repeating decimals and powers of ten written as fractions, which math-verify can parse."""
    answer = _REPEATING.sub(_repeating_as_fraction, answer)
    number = _as_number(answer)
    return answer if number is None or _is_fraction(answer) or _NUMBER.fullmatch(answer) else _as_latex(number)


def _repeating_as_fraction(match: re.Match[str]) -> str:
    """0.1(6) as a fraction: (16 - 1) / 90, by the schoolbook rule for repeating decimals."""
    whole, fixed, period = match[1] or "0", match[2], match[3] or match[4]
    denominator = (10 ** len(period) - 1) * 10 ** len(fixed)
    return rf"\frac{{{int(whole + fixed + period) - int(whole + fixed)}}}{{{denominator}}}"


def _as_latex(number: Fraction) -> str:
    sign = "-" if number < 0 else ""
    return rf"{sign}\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"
