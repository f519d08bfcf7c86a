"""Paired comparison of two tutors on the same lessons: the difference, and a significance test.

Lessons are the unit: a lesson's values are averaged first, then the difference of the averages is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Optional

import numpy as np

from src.results.statistics import paired_change
from src.rollout.intervals import BOOTSTRAP_SEED

EXACT_UP_TO = 12
"""Up to this many lessons, all assignments of signs are enumerated."""

DRAWS = 10_000


@dataclass(frozen=True)
class Difference:
    """The difference of `tutor` minus `against` in one figure.

    Attributes:
        mean: over the lessons' differences; None if no lesson has values of both tutors.
        ci95: 95 % interval from a paired bootstrap over lessons; None for fewer than two lessons.
        p: p-value of the sign-flip test; None if `mean` is None.
        p_holm: p after Holm's correction for all pairs of tutors that are compared in this figure.
        lessons: the number of lessons with values of both tutors.
    """

    tutor: str
    against: str
    mean: Optional[float]
    ci95: Optional[list[float]]
    p: Optional[float]
    p_holm: Optional[float]
    lessons: int


def sign_flip_p(differences: Sequence[float]) -> Optional[float]:
    """Two-sided p of a paired permutation test (Fisher, 1935): the probability of a mean at least as far from 0 if the
    sign of each lesson's difference were random. Exact for up to `EXACT_UP_TO` lessons, else estimated from `DRAWS`
    seeded assignments of signs and the observed one. None without differences."""
    values = np.array(differences, dtype=float)
    n = len(values)
    if n == 0:
        return None
    observed = abs(values.sum())
    if n <= EXACT_UP_TO:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(np.abs(signs @ values) >= observed - 1e-9))
    signs = 1 - 2 * np.random.default_rng(BOOTSTRAP_SEED).integers(0, 2, size=(DRAWS, n), dtype=np.int8)
    hits = int(np.sum(np.abs(signs @ values) >= observed - 1e-9))
    return (hits + 1) / (DRAWS + 1)


def holm(values: Sequence[Optional[float]]) -> list[Optional[float]]:
    """Holm's step-down correction (1979): the smallest of m p-values × m, the next × (m − 1), and so on. A corrected
    value is never below the one before it and never above 1. None stays None and does not count towards m."""
    known = sorted((p, place) for place, p in enumerate(values) if p is not None)
    corrected: list[Optional[float]] = [None] * len(values)
    least = 0.0
    for rank, (p, place) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - rank)))
        corrected[place] = least
    return corrected


def differences(by_tutor: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Difference]:
    """The difference of each pair of tutors, later ones minus earlier ones.

    Args:
        by_tutor: tutor → lesson → the values of one figure.
    """
    names = list(by_tutor)
    pairs = [(tutor, against) for i, against in enumerate(names) for tutor in names[i + 1 :]]
    estimates = [paired_change(by_tutor[against], by_tutor[tutor]) for tutor, against in pairs]
    chances = [sign_flip_p(_by_lesson(by_tutor[tutor], by_tutor[against])) for tutor, against in pairs]
    return [
        Difference(tutor, against, each["mean"], each["ci95"], p, p_holm, each["n"])
        for (tutor, against), each, p, p_holm in zip(pairs, estimates, chances, holm(chances), strict=True)
    ]


def _by_lesson(values: Mapping[str, Sequence[float]], against: Mapping[str, Sequence[float]]) -> list[float]:
    common = [lesson for lesson, group in values.items() if group and against.get(lesson)]
    return [fmean(values[lesson]) - fmean(against[lesson]) for lesson in common]
