"""Paired comparison of two tutors on the same lessons: the difference, and a significance test.

Lessons are the unit: a lesson's values are averaged first, then the difference of the averages is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from classroom_rl.results.statistics import paired_change


@dataclass(frozen=True)
class Difference:
    """The difference of `tutor` minus `against` in one figure.

    Attributes:
        mean: over the lessons' differences; None if no lesson has values of both tutors.
        ci95: 95 % interval over lessons (`classroom_rl.rollout.intervals`); None for fewer than six.
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
    return [
        Difference(tutor, against, each["mean"], each["ci95"], each["p"], p_holm, each["n"])
        for (tutor, against), each, p_holm in zip(
            pairs, estimates, holm([each["p"] for each in estimates]), strict=True
        )
    ]
