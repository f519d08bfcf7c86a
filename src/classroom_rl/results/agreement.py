"""Measures of agreement between judges, between judges and people, and of prices with outcomes."""

from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from classroom_rl.rollout.intervals import LEAST_FOR_CORRELATIONS, draws, interval_of_statistic, sign_flip_p

RESAMPLES = 10_000
CORRELATION_RESAMPLES = 2_000


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
    """The 95 % interval of the rank correlation over lessons (`interval_of_statistic`); None for fewer than
    `LEAST_FOR_CORRELATIONS` lessons. Resamples without a correlation, as all scores of one side are equal in them, are
    left out; None if the scores of all but one lesson are."""
    lessons = [list(group) for group in pairs.values() if group]
    whole = rank_correlation(sum(lessons, []))
    without_each = [rank_correlation(sum(lessons[:at] + lessons[at + 1 :], [])) for at in range(len(lessons))]
    if len(lessons) < LEAST_FOR_CORRELATIONS or whole is None or None in without_each:
        return None
    found = [
        rank_correlation([pair for lesson, times in zip(lessons, drawn, strict=True) for pair in lesson * times])
        for drawn in draws(len(lessons), resamples).tolist()
    ]
    known = [value for value in found if value is not None]
    return interval_of_statistic(whole, known, without_each, LEAST_FOR_CORRELATIONS)


def rank_correlation_p(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> Optional[float]:
    """Two-sided p of a permutation test of the rank correlation: the probability of one at least as far from 0 if the
    sign of what each lesson adds to it were random. Pairs of one lesson resemble each other, so they are not shuffled
    one by one: that would find a correlation where a few lessons differ. None without a correlation."""
    everything = [pair for group in pairs.values() for pair in group]
    if rank_correlation(everything) is None:
        return None
    first, second = (_ranks(side) for side in zip(*everything, strict=True))
    added = (first - first.mean()) * (second - second.mean())
    ends = np.cumsum([len(group) for group in pairs.values()])[:-1]
    added /= np.abs(added).max()
    return sign_flip_p([float(part.sum()) for part in np.split(added, ends)])


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
    """The sums of tables (groups, …): of all groups; in each of `RESAMPLES` bootstrap samples of them; and without
    each of them."""
    flat = tables.reshape(len(tables), -1)
    whole = flat.sum(axis=0)
    rows = np.concatenate([whole[None], draws(len(tables), RESAMPLES) @ flat, whole - flat])
    return rows.reshape(-1, *tables.shape[1:])


def interval_of(values: np.ndarray) -> Optional[list[float]]:
    """The 95 % interval of what `resampled` tables give."""
    return interval_of_statistic(float(values[0]), values[1 : RESAMPLES + 1], values[RESAMPLES + 1 :])
