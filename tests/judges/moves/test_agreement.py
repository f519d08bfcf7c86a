"""Cohen's kappa and its interval, on numbers worked out by hand."""

import numpy as np
import pytest

from classroom_rl.judges.moves.cross_validation import agreement, difference, kappa

GIVEN = [True] * 20 + [True] * 5 + [False] * 10 + [False] * 15
FOUND = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
LESSONS = [str(place % 10) for place in range(50)]
MANY = [str(place) for place in range(50)]


def test_the_textbook_example():
    """Agreement 35 of 50; by chance 0.5 · 0.6 + 0.5 · 0.4 = 0.5; (0.7 − 0.5) / 0.5 = 0.4."""
    found = agreement(GIVEN, FOUND, LESSONS)
    assert found.kappa == pytest.approx(0.4) == kappa(np.array(GIVEN), np.array(FOUND))
    assert (found.precision, found.recall, found.base_rate) == (20 / 30, 20 / 25, 0.5)
    assert (found.messages, found.lessons) == (50, 10)
    assert found.ci95 is None, "ten lessons: no interval of a kappa covers"
    low, high = agreement(GIVEN, FOUND, MANY).ci95
    assert -1 <= low < 0.4 < high <= 1


def test_full_agreement_and_none():
    assert agreement(GIVEN, GIVEN, LESSONS).kappa == 1
    assert agreement(GIVEN, [not each for each in GIVEN], LESSONS).kappa == -1


def test_who_always_says_the_same_agrees_by_chance_alone():
    found = agreement([True] * 4, [True] * 4, list("abcd"))
    assert found.kappa == 0 and found.precision == 1
    assert agreement(GIVEN, [False] * 50, LESSONS).precision is None


def test_the_interval_is_over_lessons_not_messages():
    """The same messages in a hundred copies of each lesson's first: few lessons stay few."""
    many = agreement(GIVEN * 40, FOUND * 40, MANY * 40)
    few = agreement(GIVEN, FOUND, MANY)
    assert many.ci95 == pytest.approx(few.ci95) and many.messages == 2000


def test_a_difference():
    gain, (low, high) = difference(GIVEN, GIVEN, FOUND, MANY)
    assert gain == pytest.approx(0.6) and 0 < low < gain < high
    assert difference(GIVEN, FOUND, FOUND, MANY) == (0, [0, 0])
    assert difference(GIVEN, GIVEN, FOUND, LESSONS)[1] is None
