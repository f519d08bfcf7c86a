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
_BARE_NAMES = "|".join(sorted((f"{name}s?" for name in _UNITS if len(name) > 1 and name.isalpha()), key=len)[::-1])
_UNIT_IN_TEXT = re.compile(rf"(?P<value>.*\S)\s*{_TEXT}(?P<power>\s*\^\s*\{{?\d\}}?)?", re.DOTALL)
_BARE_UNIT = re.compile(
    rf"(?P<value>.*[\d}})])(?:\s|\\ )*(?P<unit>\\?%|(?:sq(?:uare)?\.?\s|cubic\s)?(?:{_BARE_NAMES})"
    rf"(?:\s*(?:/|per)\s*(?:{_BARE_NAMES}|[smh])(?![a-z]))?)(?P<power>\s*\^\s*\{{?\d\}}?)?",
    re.DOTALL | re.IGNORECASE,
)
_CURRENCY = re.compile(r"([+-]?)\s*(\\\$|\$|€|£)\s*(?=[\d.])")


def extract_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` in the text, with balanced braces; None if there is none."""
    found, found_at = None, -1
    open_braces: list[tuple[int, bool]] = []
    for token in _BOX_OR_BRACE.finditer(text):
        if token["box"] or token[0] == "{":
            open_braces.append((token.end(), bool(token["box"])))
        elif token[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and start > found_at:
                found, found_at = text[start : token.start()], start
    return found


def compare_as_text(given: str, wanted: str) -> bool | list[Pair]:
    """Whether two answers are equal, if their texts decide that. Otherwise pairs of LaTeX expressions: the answer is
    right if the two expressions of any pair are equal.

    - Equal texts and equal plain numbers are right; different plain decimals are wrong.
    - Words are compared as words, ignoring case: "Monday" is no product of variables.
    - If both sides give a unit, the units must be the same (none is converted). A unit on one side only is ignored.
    - If only one side has a percent sign, it may be dropped or applied: 50 % equals 50 and 0.5.
    - A set in braces never equals a tuple or an interval.
    """
    given, wanted = _tidy(given), _tidy(wanted)
    if _bare(given) == _bare(wanted):
        return bool(_bare(wanted))
    if len(given) > LONGEST or len(wanted) > LONGEST:
        return False
    if _is_words(wanted):
        return _letters(given) == _letters(wanted)
    (given, unit), (wanted, wanted_unit) = _split_unit(given), _split_unit(wanted)
    if unit and wanted_unit and unit != wanted_unit:
        return False
    if _is_set(given) and _is_tuple(wanted) or _is_tuple(given) and _is_set(wanted):
        return False
    pairs = [(given, wanted)]
    if unit == "%" and wanted_unit is None:
        pairs.append((_hundredth(given), wanted))
    elif wanted_unit == "%" and unit is None:
        pairs.append((given, _hundredth(wanted)))
    return _compare_numbers(pairs)


def _compare_numbers(pairs: list[Pair]) -> bool | list[Pair]:
    """True if the two sides of a pair are the same number. Otherwise the pairs that are still undecided, or False if
    there are none."""
    left = []
    for given, wanted in pairs:
        numbers = _as_number(given), _as_number(wanted)
        if None in numbers:
            left.append((_spell_out(given), _spell_out(wanted)))
        elif numbers[0] == numbers[1]:
            return True
        elif _is_fraction(given) != _is_fraction(wanted):  # 0.333333 for 1/3 is a matter of rounding
            left.append((given, wanted))
    return left or False


# Reading an answer ---------------------------------------------------------------------------------------------------


def _tidy(answer: str) -> str:
    """The answer without box, dollar signs, spacing commands and final full stop, and with degree signs as a unit."""
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


def _bare(answer: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", answer)


def _is_words(answer: str) -> bool:
    """Whether the answer is words and no formula: all of it in \\text{…}, or no digits and symbols but at least four
    letters in a row."""
    only_text = _ONLY_TEXT.fullmatch(answer)
    return bool(only_text and len(_letters(only_text[1])) > 1 or _WORDS.fullmatch(answer))


def _letters(answer: str) -> str:
    return "".join(each for each in _ONLY_TEXT.sub(r"\1", answer).casefold() if each.isalnum() or each == "-")


def _is_set(answer: str) -> bool:
    return answer.startswith(("\\{", "\\lbrace")) and answer.endswith(("\\}", "\\rbrace"))


def _is_tuple(answer: str) -> bool:
    return answer.startswith(("(", "[")) and answer.endswith((")", "]")) and "," in answer


# Units ---------------------------------------------------------------------------------------------------------------


def _split_unit(answer: str) -> tuple[str, str | None]:
    """The answer without its unit, and the unit's normalised name, or None without a unit."""
    if currency := _CURRENCY.match(answer):
        return currency[1] + answer[currency.end() :], _unit_name(currency[2])
    if found := _UNIT_IN_TEXT.fullmatch(answer):
        return found["value"], _unit_name(found[2] + (found["power"] or ""))
    if found := _BARE_UNIT.fullmatch(answer):
        return found["value"], _unit_name(found["unit"] + (found["power"] or ""))
    return answer, None


def _unit_name(unit: str) -> str:
    unit = unit.casefold().replace("\\", "").replace("²", "^2").replace("³", "^3").replace(" per ", "/")
    unit, squares = re.subn(r"\b(?:square|sq)\b\.?\s*(.*)", r"\1^2", unit)
    if not squares:
        unit = re.sub(r"\bcubic\s*(.*)", r"\1^3", unit)
    parts = re.split(r"([/^*])", re.sub(r"[\s.{}]", "", unit))
    return "".join(_UNITS.get(part) or _UNITS.get(part.removesuffix("s"), part.removesuffix("s")) for part in parts)


def _hundredth(value: str) -> str:
    number = _as_number(value)
    return rf"\frac{{{value}}}{{100}}" if number is None else _as_latex(number / 100)


# Numbers -------------------------------------------------------------------------------------------------------------


def _as_number(answer: str) -> Fraction | None:
    """The value of a plain number: an integer, a decimal, a fraction, a number with commas between thousands or times a
    power of ten. None for anything else."""
    answer = _bare(answer)
    if len(answer) > 64:
        return None
    if power := _POWER_OF_TEN.fullmatch(answer):
        front = _as_number(power[1] or power[4])
        return None if front is None else front * Fraction(10) ** int(power[2] or power[3] or power[5])
    if _COMMAS.fullmatch(answer):  # "1,234" is a number, "1,2" is a pair
        return Fraction(answer.replace(",", ""))
    if _NUMBER.fullmatch(answer):
        return Fraction(answer.rstrip(".") or "0")
    if fraction := _FRACTION.fullmatch(answer):
        sign, top, bottom = fraction[1] or "", fraction[2] or fraction[4], fraction[3] or fraction[5]
        return None if int(bottom) == 0 else Fraction(int(top), int(bottom)) * (-1 if sign == "-" else 1)
    return None


def _is_fraction(answer: str) -> bool:
    return "frac" in answer or "/" in answer


def _spell_out(answer: str) -> str:
    """The answer with repeating decimals and powers of ten written as fractions, which math-verify can parse."""
    answer = _REPEATING.sub(_repeating_as_fraction, answer)
    number = _as_number(answer)
    return answer if number is None or _is_fraction(answer) or _NUMBER.fullmatch(answer) else _as_latex(number)


def _repeating_as_fraction(match: re.Match[str]) -> str:
    whole, fixed, period = match[1] or "0", match[2], match[3] or match[4]
    bottom = (10 ** len(period) - 1) * 10 ** len(fixed)
    return rf"\frac{{{int(whole + fixed + period) - int(whole + fixed)}}}{{{bottom}}}"


def _as_latex(number: Fraction) -> str:
    sign = "-" if number < 0 else ""
    return rf"{sign}\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"
