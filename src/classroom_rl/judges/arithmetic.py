"""Reads numbers and simple equations such as "12 × 4 = 48" in prose, without evaluating any text as code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

LONGEST_NUMBER = 15
"""In digits; a longer number is not read."""

_DIGITS = r"\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_FRACTION = r"\\[dt]?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}"
NUMBER = rf"[-−]?(?:(?:\d+\s*)?{_FRACTION}|{_DIGITS})"
"""A pattern for an integer, a decimal, a number with commas between thousands, or a LaTeX fraction."""

_FRACTION_PARTS = re.compile(r"(\d+)?\s*\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_OPERATIONS = {
    "+": "+",
    **dict.fromkeys(("-", "−", "–"), "-"),
    **dict.fromkeys(("*", "×", "·", "⋅", "x", "\\times", "\\cdot"), "*"),
    **dict.fromkeys(("/", "÷", "\\div"), "/"),
}
_OPERATOR = "|".join(re.escape(each) for each in _OPERATIONS)
_BEFORE = r"(?<![\w.,^\\{})\[\]%°!|])"
_EQUATION = re.compile(rf"{_BEFORE}({NUMBER})\s*({_OPERATOR})\s*({NUMBER})\s*=\s*({NUMBER})")
_OPERATION = re.compile(rf"{_BEFORE}({NUMBER})\s*({_OPERATOR})\s*({NUMBER})")
_GOES_ON_BEFORE = re.compile(r"(?:[-+−–*×·⋅/÷^=\[{|!]|(?<!\\)\(|\\[a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z]|[\d)\]}%°])\s*$|:$")
_GOES_ON_AFTER = re.compile(
    r"[.,:]?\d|\s*(?:[-+−–*×·⋅/÷^(\[{|!%°:]|\\(?!\))|\.\.|…|[a-zA-Z](?![a-zA-Z])|"
    r"(?:times|plus|minus|over|divided|squared|cubed|percent|mod|modulo|remainder|rem|with|and|to the|pi|sqrt)\b|"
    r"\(?\s*mod\b)",
)


@dataclass(frozen=True)
class Equation:
    """An equation "left operation right = result" as it stands in a text from `start` on; `operation` is one of + - * /
    and `decimals` the number of places after the result's decimal point."""

    left: Fraction
    operation: str
    right: Fraction
    result: Fraction
    decimals: int
    text: str
    start: int

    @property
    def holds(self) -> bool:
        """Whether the equation is true. A decimal result may be rounded or cut off at its last place."""
        value = _calculate(self.left, self.operation, self.right)
        if value is None:
            return True
        return value == self.result or (self.decimals > 0 and abs(value - self.result) < Fraction(1, 10**self.decimals))


def read_number(text: str) -> Fraction | None:
    """The value of a number as `NUMBER` matches it; None for anything else, a number with more than `LONGEST_NUMBER`
    digits, or a fraction over 0."""
    plain = text.strip().replace("−", "-").replace("{,}", "").replace(",", "")
    sign, plain = (-1, plain[1:]) if plain.startswith("-") else (1, plain)
    if sum(each.isdigit() for each in plain) > LONGEST_NUMBER or not plain.isascii():
        return None
    if parts := _FRACTION_PARTS.fullmatch(plain):
        bottom = int(parts[3])
        return sign * (int(parts[1] or 0) + Fraction(int(parts[2]), bottom)) if bottom else None
    return sign * Fraction(plain) if re.fullmatch(r"\d+(?:\.\d+)?|\.\d+", plain) else None


def equations(text: str) -> Iterator[Equation]:
    """The equations in a text whose two sides are numbers alone. What is part of a longer expression, or goes on with a
    variable or a unit of one letter, is left out."""
    for found in _EQUATION.finditer(text):
        before, after = text[: found.start()], text[found.end() :]
        if _GOES_ON_BEFORE.search(before[-20:]) or _GOES_ON_AFTER.match(after):
            continue
        left, right, result = (read_number(found[place]) for place in (1, 3, 4))
        if left is None or right is None or result is None:
            continue
        decimals = len(found[4].partition(".")[2])
        operation = _OPERATIONS[found[2]]
        yield Equation(left, operation, right, result, decimals, found[0], found.start())


def values_of_operations(text: str) -> Iterator[Fraction]:
    """The values of the operations between two numbers in a text, such as 8 for "85 − 77". What is part of a longer
    expression is left out."""
    for found in _OPERATION.finditer(text):
        after = re.sub(r"^\s*=?\s*(?=[?？]|$)", "", text[found.end() :])
        if _GOES_ON_BEFORE.search(text[: found.start()][-20:].rstrip(": ")) or _GOES_ON_AFTER.match(after):
            continue
        left, right = read_number(found[1]), read_number(found[3])
        value = None if left is None or right is None else _calculate(left, _OPERATIONS[found[2]], right)
        if value is not None:
            yield value


def _calculate(left: Fraction, operation: str, right: Fraction) -> Fraction | None:
    """The value of one operation; None for a division by 0."""
    if operation == "+":
        return left + right
    if operation == "-":
        return left - right
    if operation == "*":
        return left * right
    return left / right if right else None
