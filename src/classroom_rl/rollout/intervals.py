"""Means and shares with their 95 % intervals. Pure functions; an empty denominator gives None, never NaN.

Conversations on one lesson are not independent of each other, so a lesson is the unit of resampling: all of its
conversations count as one draw.

Two intervals are computed, each with the right coverage on its own (`benchmarks/intervals.py`), and each end of the
result is the nearer one of the two:

- An interval from the bounds of the values: the Bayesian bootstrap (Rubin, 1981) with one more lesson, of weight
  `_UNSEEN`, at the bound. This lesson represents those that have not been seen: without it, a tutor that fails rarely
  seems never to fail. With weight 1 it is the bound of Gaffke (2005), for shares that of Clopper and Pearson (1934).
- The wider one of Student's t and the studentised bootstrap (Efron, 1979): the first has coverage where few lessons
  weigh on both sides, the second where they weigh on one side. They need no bounds, but do not exist if all lessons are
  equal.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Optional

import numpy as np

RESAMPLES = 10_000
BOOTSTRAP_SEED = 0
LEAST_LESSONS = 6
"""With fewer lessons there is no interval, and nothing is concluded: a sign-flip test of five cannot reach 0.05."""

LEAST_FOR_CORRELATIONS, LEAST_FOR_KAPPAS = 8, 30
"""With fewer lessons, no interval of such a figure that was tried covers 93 %."""

LEVEL = 0.05
"""A change counts as more than chance if its p is below this."""

EXACT_UP_TO = 12
"""Up to this many lessons, a sign-flip test enumerates all assignments of signs."""

_UNSEEN = 0.75
"""The smallest multiple of 0.25 whose intervals have 93 % coverage for shares of 2 to 50 % at 6 to 116 lessons."""

_ENDS = (0.025, 0.975)
_NUMBERS, _FEWEST = 2_000_000, 2_000
"""The numbers drawn for an interval at most, unless that leaves fewer resamples than `_FEWEST`."""

_TINY, _NO_SPREAD = 1e-9, 1e-6
"""Relative rounding errors, below which a value counts as 0: of a mean, and of a root of a difference of squares."""

UNIT = (0.0, 1.0)
Bounds = tuple[float, float]
Estimate = dict[str, Any]
"""{"mean": float or None, "ci95": [low, high] or None, "n": int}"""


def mean_with_ci(values: Mapping[str, Sequence[float]], bounds: Optional[Bounds] = None) -> Estimate:
    """Mean over all values with its 95 % interval over lessons.

    Args:
        values: the values of each lesson; lessons without a value are left out.
        bounds: the smallest and the largest possible value. If they are not given: 0 and 1 for values that all lie
            between them, unknown for others.

    Returns:
        {"mean", "ci95", "n"}; n counts values. The interval is None for fewer than `LEAST_LESSONS` lessons, and if the
        bounds are unknown and all lessons are (nearly) equal.
    """
    lessons = [list(group) for group in values.values() if group]
    if not lessons:
        return {"mean": None, "ci95": None, "n": 0}
    sums = np.array([sum(group) for group in lessons], dtype=float)
    counts = np.array([len(group) for group in lessons], dtype=float)
    known_bounds = bounds or (UNIT if within_unit(values) else None)
    return {
        "mean": float(sums.sum() / counts.sum()),
        "ci95": _interval(sums, counts, known_bounds),
        "n": int(counts.sum()),
    }


def by_lesson(lessons: Iterable[str], values: Iterable[float]) -> dict[str, list[float]]:
    """The values of each lesson, in order of appearance. `lessons` holds the lesson of each value."""
    groups: dict[str, list[float]] = {}
    for lesson, value in zip(lessons, values, strict=True):
        groups.setdefault(lesson, []).append(float(value))
    return groups


def within_unit(values: Mapping[str, Sequence[float]]) -> bool:
    """Whether all values lie between 0 and 1."""
    return all(0 <= value <= 1 for group in values.values() for value in group)


def interval_of_statistic(
    value: float, resampled: Sequence[float], without_each: Sequence[float], least: int = LEAST_FOR_KAPPAS
) -> Optional[list[float]]:
    """The 95 % interval over lessons of a kappa or a correlation, which are no means: the wider ends of the bootstrap's
    2.5th to 97.5th percentile, and of Student's t with the jackknife's standard error (Tukey, 1958).

    Args:
        value: the statistic of all lessons.
        resampled: the statistic of each resample of lessons.
        without_each: the jackknife: the statistic without the first lesson, without the second, and so on.
        least: with fewer lessons there is no interval.
    """
    lessons = len(without_each)
    if lessons < least or not len(resampled):
        return None
    low, high = np.percentile(resampled, [2.5, 97.5])
    spread = math.sqrt((lessons - 1) / lessons * float(np.sum((np.array(without_each) - np.mean(without_each)) ** 2)))
    half_width = student_t(lessons - 1) * spread
    return [max(-1.0, min(float(low), value - half_width)), min(1.0, max(float(high), value + half_width))]


def share_interval(hits: int, total: int) -> Optional[list[float]]:
    """The 95 % interval of a share of values that are independent of each other, computed as in `mean_with_ci`."""
    if total < LEAST_LESSONS:
        return None
    return _interval(np.repeat([1.0, 0.0], [hits, total - hits]), np.ones(total), UNIT)


def _interval(sums: np.ndarray, counts: np.ndarray, bounds: Optional[Bounds]) -> Optional[list[float]]:
    if len(sums) < LEAST_LESSONS:
        return None
    # Equal lessons are drawn together: there is less to draw, and the order of the lessons does not matter.
    (counts, sums), times = np.unique(np.stack([counts, sums]), axis=1, return_counts=True)
    low, high = _studentised(sums, counts, times)
    if bounds is not None:
        bounded_low, bounded_high = _bounded(sums, counts, times, bounds)
        low, high = max(low, bounded_low), min(high, bounded_high)
    return [low, high] if math.isfinite(low) and math.isfinite(high) else None


def _bounded(sums: np.ndarray, counts: np.ndarray, times: np.ndarray, bounds: Bounds) -> tuple[float, float]:
    """The ends of the Bayesian bootstrap with an unseen lesson of mean size at the bound.

    Args:
        sums, counts: the sum and the number of the values of each distinct lesson.
        times: how many lessons have this sum and number.
    """
    weights, unseen = _resamples(_weights, times)
    unseen = unseen * (times @ counts) / times.sum()
    numerators, denominators = weights @ sums, weights @ counts + unseen
    low, high = (
        float(np.quantile((numerators + unseen * bound) / denominators, end))
        for bound, end in zip(bounds, _ENDS, strict=True)
    )
    return low, high


def _studentised(sums: np.ndarray, counts: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """The wider ends of Student's t and the studentised bootstrap; infinite where a resample has no spread."""
    lessons, total = times.sum(), times @ counts
    mean = (times @ sums) / total
    residuals = sums - mean * counts
    spread = math.sqrt(times @ residuals**2) / total
    if spread <= _TINY * max(1.0, abs(mean)):
        return -math.inf, math.inf
    drawn = _resamples(_times_drawn, times)
    drawn_counts = drawn @ counts
    # Of each resample: its mean minus the mean, and its spread about its own mean, with the square multiplied out.
    deviations = (drawn @ residuals) / drawn_counts
    squares = (
        drawn @ residuals**2 - 2 * deviations * (drawn @ (residuals * counts)) + deviations**2 * (drawn @ counts**2)
    )
    spreads = np.sqrt(np.maximum(squares, 0)) / drawn_counts
    spreads[spreads <= _NO_SPREAD * spread] = 0
    deviations[np.abs(deviations) <= _TINY * spread] = 0
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample without spread gives an infinite ratio
        ratios = np.where(deviations == 0, 0.0, deviations / spreads)
    low_ratio = np.quantile(ratios, _ENDS[0], method="lower")
    high_ratio = np.quantile(ratios, _ENDS[1], method="higher")
    student = student_t(lessons - 1) * math.sqrt(lessons / (lessons - 1))
    return float(mean - spread * max(high_ratio, student)), float(mean - spread * min(low_ratio, -student))


def _weights(generator: np.random.Generator, times: np.ndarray, resamples: int) -> tuple[np.ndarray, np.ndarray]:
    """Gamma weights (resamples × distinct lessons), and those of the unseen lesson (resamples)."""
    seen = generator.standard_gamma(times, size=(resamples, len(times)))
    return seen, generator.standard_gamma(_UNSEEN, size=resamples)


def _times_drawn(generator: np.random.Generator, times: np.ndarray, resamples: int) -> np.ndarray:
    """How often each distinct lesson is drawn (resamples × distinct lessons)."""
    return generator.multinomial(times.sum(), times / times.sum(), size=resamples).astype(float)


def _resamples(draw: Callable[[np.random.Generator, np.ndarray, int], Any], times: np.ndarray) -> Any:
    """The resamples that `draw` makes of lessons that occur so many times; of very many lessons, fewer resamples."""
    return _cached_resamples(draw, tuple(times.tolist()), max(_FEWEST, min(RESAMPLES, _NUMBERS // len(times))))


@lru_cache(maxsize=8)
def _cached_resamples(draw: Callable[..., Any], times: tuple[int, ...], resamples: int) -> Any:
    """Cached, because most figures of a report are over equally many lessons, so their resamples are the same."""
    return draw(np.random.default_rng(BOOTSTRAP_SEED), np.array(times), resamples)


def shown(estimate: Mapping[str, Any], sign: str = "", digits: int = 3) -> str:
    """An estimate as "0.972 [0.957, 0.985]"; without an interval as "0.972 (n = 4)", without values as a dash."""
    if estimate["mean"] is None:
        return "–"
    number = f"{{:{sign}.{digits}f}}".format
    ends = estimate["ci95"]
    return f"{number(estimate['mean'])} " + (
        f"(n = {estimate['n']})" if ends is None else f"[{number(ends[0])}, {number(ends[1])}]"
    )


@cache
def student_t(freedom: int) -> float:
    """The 97.5th percentile of Student's t with this many degrees of freedom: where the density, integrated from 0,
    reaches 0.475."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    grid = np.linspace(0, 13, 130_001)
    density = scale * (1 + grid**2 / freedom) ** (-(freedom + 1) / 2)
    integral = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2) * (grid[1] - grid[0])])
    return float(np.interp(0.475, integral, grid))


@lru_cache(maxsize=4)
def draws(lessons: int, resamples: int) -> np.ndarray:
    """How often each lesson is drawn (resamples × lessons); the same for all figures over this number of lessons."""
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    return generator.multinomial(lessons, np.full(lessons, 1 / lessons), size=resamples)


def sign_flip_p(differences: Sequence[float]) -> Optional[float]:
    """Two-sided p of a paired permutation test (Fisher, 1935): the probability of a mean at least as far from 0 if the
    sign of each lesson's difference were random. Exact for up to `EXACT_UP_TO` lessons, otherwise estimated from
    `RESAMPLES` seeded assignments of signs and the observed one. None without differences."""
    values = np.array(differences, dtype=float)
    n = len(values)
    if n == 0:
        return None
    observed = abs(values.sum())
    if n <= EXACT_UP_TO:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(np.abs(signs @ values) >= observed - 1e-9))  # less a rounding error
    signs = 1 - 2 * np.random.default_rng(BOOTSTRAP_SEED).integers(0, 2, size=(RESAMPLES, n), dtype=np.int8)
    hits = int(np.sum(np.abs(signs @ values) >= observed - 1e-9))
    return (hits + 1) / (RESAMPLES + 1)


def share(hits: Iterable[bool]) -> tuple[Optional[float], int]:
    """(share of True, number of values); (None, 0) without values."""
    counted = [bool(hit) for hit in hits]
    return (sum(counted) / len(counted) if counted else None), len(counted)
