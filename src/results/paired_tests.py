"""Two tutors on the same lessons: how far apart they are, and whether chance would do as much.

Lessons are what is compared: a lesson's values are averaged first, then its difference is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Optional

import numpy as np

from src.results.statistics import BOOTSTRAP_SEED, paired_change

EXACT_UP_TO = 12
"""Lessons up to which all assignments of signs are tried."""

DRAWS = 10_000


@dataclass(frozen=True)
class Difference:
    """How far `tutor` lies above `against` in a figure.

    Attributes:
        mean: of the lessons' differences; None if no lesson has values of both.
        ci95: its interval, from a paired bootstrap over lessons; None for fewer than two lessons.
        p: of the sign-flip test; None like `mean`.
        p_holm: p after Holm's correction for all pairs of tutors that are compared in this figure.
        lessons: how many have values of both.
    """

    tutor: str
    against: str
    mean: Optional[float]
    ci95: Optional[list[float]]
    p: Optional[float]
    p_holm: Optional[float]
    lessons: int


def sign_flip_p(differences: Sequence[float]) -> Optional[float]:
    """Two-sided p of a paired permutation test (Fisher, 1935): how often a mean at least as far from 0 comes about if
    each lesson's difference had its sign by chance. Exact for up to `EXACT_UP_TO` lessons, else from `DRAWS` seeded
    assignments, the observed one among them. None of no differences."""
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
    """Holm's step-down correction (1979): the smallest of m p-values × m, the next × (m − 1) …, none below the one
    before it, none above 1. None stays None and does not count."""
    known = sorted((p, place) for place, p in enumerate(values) if p is not None)
    corrected: list[Optional[float]] = [None] * len(values)
    least = 0.0
    for rank, (p, place) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - rank)))
        corrected[place] = least
    return corrected


def differences(by_tutor: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Difference]:
    """Every pair of tutors, the later ones against the earlier ones.

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
