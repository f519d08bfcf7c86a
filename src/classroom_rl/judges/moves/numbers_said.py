"""Which numbers a tutor's message holds, and which of them its student has heard before."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from classroom_rl.judges.arithmetic import read_number, values_of_operations
from classroom_rl.judges.readings import Exchange

_NUMBER = re.compile(r"(?<![\d.,])\d[\d,]*(?:\.\d+)?|\.\d+")
_ASKED_LATELY = 2
"""How many messages back the tutor's question may stand whose result is the answer."""


@dataclass(frozen=True)
class Number:
    """A number in a text: its value, and where it begins and ends."""

    value: Fraction
    start: int
    end: int


def numbers(text: str) -> Iterator[Number]:
    """The numbers in a text, in order, without signs and units."""
    for found in _NUMBER.finditer(text):
        value = read_number(re.sub(r",(?!\d{3}(?!\d))", "", found[0].rstrip(",")))
        if value is not None:
            yield Number(value, found.start(), found.end())


def values(texts: Iterable[str]) -> frozenset[Fraction]:
    """The values of all numbers in some texts."""
    return frozenset(each.value for text in texts for each in numbers(text))


@lru_cache(maxsize=4096)
def answers(about: Exchange) -> frozenset[Fraction]:
    """The values that answer the tutor's question: the number in the target, and without a target the results of the
    operations in the last messages before the student's, such as 8 after "What is 85 − 77?"."""
    if about.target:
        return values([about.target])
    return frozenset(each for text in about.before[-_ASKED_LATELY:] for each in values_of_operations(text))


def last_number(text: str) -> str:
    """The last number of a text as it is written; "" without one. In the solutions of published data sets of word
    problems it is the answer."""
    found = _NUMBER.findall(text)
    return found[-1].rstrip(",") if found else ""
