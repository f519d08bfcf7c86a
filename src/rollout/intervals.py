"""Means and shares with their 95 % intervals. Pure functions; an empty denominator gives None, never NaN.

Conversations on one lesson resemble each other, so intervals are bootstrapped over lessons, not over conversations
or turns: each resample draws as many lessons as there are, with replacement, and takes all conversations of each.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Optional

import numpy as np

RESAMPLES = 10_000
BOOTSTRAP_SEED = 0
_Z_95 = 1.959963984540054
Estimate = dict[str, Any]
"""{"mean": float or None, "ci95": [low, high] or None, "n": int}"""


def mean_with_ci(values: Mapping[str, Sequence[float]], resamples: int = RESAMPLES) -> Estimate:
    """Mean over all values with its 95 % interval, the 2.5th to 97.5th percentile of a seeded bootstrap over lessons.

    Args:
        values: the values of each lesson; lessons without a value are left out.

    Returns:
        {"mean", "ci95", "n"}; n counts values. The interval is None for fewer than two lessons.
    """
    lessons = [list(group) for group in values.values() if group]
    sums = np.array([sum(group) for group in lessons], dtype=float)
    counts = np.array([len(group) for group in lessons], dtype=float)
    if not lessons:
        return {"mean": None, "ci95": None, "n": 0}
    return {
        "mean": float(sums.sum() / counts.sum()),
        "ci95": _interval(sums, counts, resamples),
        "n": int(counts.sum()),
    }


def _interval(sums: np.ndarray, counts: np.ndarray, resamples: int) -> Optional[list[float]]:
    lessons = len(sums)
    if lessons < 2:
        return None
    drawn = draws(lessons, resamples)
    means = (drawn @ sums) / (drawn @ counts)
    low, high = np.percentile(means, [2.5, 97.5])
    return [float(low), float(high)]


@lru_cache(maxsize=4)
def draws(lessons: int, resamples: int) -> np.ndarray:
    """How often each lesson is drawn, by resample; the same for all figures on this number of lessons."""
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    return generator.multinomial(lessons, np.full(lessons, 1 / lessons), size=resamples)


def share(hits: Iterable[bool]) -> tuple[Optional[float], int]:
    """(share of True, number of values); (None, 0) without values."""
    counted = [bool(hit) for hit in hits]
    return (sum(counted) / len(counted) if counted else None), len(counted)


def wilson_interval(hits: int, total: int) -> Optional[tuple[float, float]]:
    """The 95 % Wilson score interval of a share, for values that are independent of each other; None without values."""
    if not total:
        return None
    share_of_hits, doubt = hits / total, _Z_95**2 / total
    middle = (share_of_hits + doubt / 2) / (1 + doubt)
    reach = _Z_95 * math.sqrt(share_of_hits * (1 - share_of_hits) / total + doubt / (4 * total)) / (1 + doubt)
    return max(0.0, middle - reach), min(1.0, middle + reach)
