"""Measures of agreement between judges, between judges and people, and of prices with outcomes."""

from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from src.rollout.intervals import BOOTSTRAP_SEED, draws

RESAMPLES = 10_000
CORRELATION_RESAMPLES = 2_000
_PERMUTATIONS = 10_000


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> Optional[float]:
    """Spearman's rank correlation; ties share their mean rank. None for fewer than three pairs, or if all scores of one
    side are equal."""
    if len(pairs) < 3:
        return None
    first, second = (_ranks(side) for side in zip(*pairs, strict=True))
    if not (np.ptp(first) and np.ptp(second)):
        return None
    return float(np.corrcoef(first, second)[0, 1])


def rank_correlation_by_lesson(
    pairs: Mapping[str, Sequence[tuple[float, float]]], resamples: int = CORRELATION_RESAMPLES
) -> Optional[list[float]]:
    """The 95 % interval of the rank correlation: the 2.5th to 97.5th percentile of a seeded bootstrap over lessons.
    Resamples without a correlation, as all scores of one side are equal in them, are left out; None if no resample has
    one, or for fewer than two lessons."""
    lessons = [list(group) for group in pairs.values() if group]
    if len(lessons) < 2:
        return None
    found = [
        rank_correlation([pair for lesson, times in zip(lessons, drawn, strict=True) for pair in lesson * times])
        for drawn in draws(len(lessons), resamples).tolist()
    ]
    known = [value for value in found if value is not None]
    return [float(end) for end in np.percentile(known, [2.5, 97.5])] if known else None


def rank_correlation_p(pairs: Sequence[tuple[float, float]]) -> Optional[float]:
    """Two-sided p of a permutation test of the rank correlation: the probability of one at least as far from 0 if one
    side were shuffled. Estimated from seeded permutations and the observed one. None without a correlation."""
    observed = rank_correlation(pairs)
    if observed is None:
        return None
    first, second = (_standardized(_ranks(side)) for side in zip(*pairs, strict=True))
    shuffled = np.random.default_rng(BOOTSTRAP_SEED).permuted(np.tile(second, (_PERMUTATIONS, 1)), axis=1)
    hits = int(np.sum(np.abs(shuffled @ first) >= abs(observed) - 1e-9))
    return (hits + 1) / (_PERMUTATIONS + 1)


def _standardized(values: np.ndarray) -> np.ndarray:
    """The values, so that the scalar product of two such arrays is their correlation."""
    centred = values - values.mean()
    return centred / np.linalg.norm(centred)


def krippendorff_alpha(units: Sequence[Sequence[Optional[float]]]) -> Optional[float]:
    """Krippendorff's α for interval data (Krippendorff, "Content Analysis", 2004, chapter 11): 1 − observed / expected
    disagreement. 1 is full agreement, 0 is agreement by chance.

    Args:
        units: for each conversation the score of each judge, None if the judge has none.

    Returns:
        None if no conversation has two scores, or all scores are the same.
    """
    paired = [[value for value in unit if value is not None] for unit in units]
    paired = [values for values in paired if len(values) > 1]
    everything = np.array([value for values in paired for value in values], dtype=float)
    n = len(everything)
    if n == 0 or not np.ptp(everything):
        return None
    observed = sum(_squares(np.array(values, dtype=float)) / (len(values) - 1) for values in paired) / n
    return float(1 - observed / (_squares(everything) / (n * (n - 1))))


def _squares(values: np.ndarray) -> float:
    """The sum over all ordered pairs of their squared difference."""
    return float(2 * (len(values) * np.sum(values**2) - np.sum(values) ** 2))


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.array(values, dtype=float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def confusion_by_group(
    given: Sequence[int], found: Sequence[int], groups: Sequence[str], categories: int
) -> np.ndarray:
    """For each group how often people gave category i and a judge category j, of shape (groups, categories,
    categories). A group is what is resampled together, such as the replies to one dialogue."""
    names = {name: place for place, name in enumerate(dict.fromkeys(groups))}
    tables = np.zeros((len(names), categories, categories))
    for label, value, group in zip(given, found, groups, strict=True):
        tables[names[group], label, value] += 1
    return tables


def disagreement_weights(categories: int, ordinal: bool) -> np.ndarray:
    """What each confusion counts: 1 in each for categories without an order, the square of their distance for ordered
    ones (Cohen, "Weighted kappa", 1968), as a share of the largest."""
    places = np.arange(categories)
    apart = np.abs(places[:, None] - places[None, :])
    return (apart / (categories - 1)) ** 2 if ordinal else (apart > 0).astype(float)


def weighted_kappa(tables: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Cohen's kappa of confusion tables (…, k, k): 1 − observed / expected disagreement. 1 is full agreement, 0 is
    agreement by chance; 0, too, if both sides always say the same one thing."""
    tables = np.asarray(tables, float)
    total = tables.sum(axis=(-1, -2))
    expected = tables.sum(axis=-1)[..., :, None] * tables.sum(axis=-2)[..., None, :]
    observed, chance = (np.sum(weights * each, axis=(-1, -2)) for each in (tables, expected))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = 1 - observed * total / chance
    return np.where(chance > 0, found, 0.0)


def resampled(tables: np.ndarray) -> np.ndarray:
    """The sums of tables (groups, …) in each of `RESAMPLES` bootstrap samples of groups."""
    flat = tables.reshape(len(tables), -1)
    return (draws(len(tables), RESAMPLES) @ flat).reshape(-1, *tables.shape[1:])


def interval_of(values: np.ndarray, groups: int) -> Optional[list[float]]:
    """The 95 % interval of resampled values; None for fewer than two groups."""
    if groups < 2:
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return [float(low), float(high)]
