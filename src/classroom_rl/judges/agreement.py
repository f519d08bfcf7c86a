"""Measures of agreement: between judges, between judges and people, and between prices of messages and outcomes."""

from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from classroom_rl.rollout.intervals import LEAST_FOR_CORRELATIONS, draws, interval_of_statistic, sign_flip_p

RESAMPLES = 10_000
CORRELATION_RESAMPLES = 2_000


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> Optional[float]:
    """Compute Spearman's rank correlation; ties share their mean rank. None for fewer than three pairs, or if all
    scores of one side are equal."""
    if len(pairs) < 3:
        return None
    first, second = (_ranks(side) for side in zip(*pairs, strict=True))
    if not (np.ptp(first) and np.ptp(second)):
        return None
    return float(np.corrcoef(first, second)[0, 1])


def rank_correlation_by_lesson(
    pairs: Mapping[str, Sequence[tuple[float, float]]], resamples: int = CORRELATION_RESAMPLES
) -> Optional[list[float]]:
    """Compute the 95 % interval of the rank correlation over lessons (`interval_of_statistic`).

    Resamples without a correlation, because all scores of one side are equal, are left out.

    Args:
        pairs: lesson → its pairs of scores.

    Returns:
        None for fewer than `LEAST_FOR_CORRELATIONS` lessons, or if there is no correlation with all lessons or without
        one of them.
    """
    lessons = [list(group) for group in pairs.values() if group]
    correlation = rank_correlation(sum(lessons, []))
    without_each = [rank_correlation(sum(lessons[:index] + lessons[index + 1 :], [])) for index in range(len(lessons))]
    if len(lessons) < LEAST_FOR_CORRELATIONS or correlation is None or None in without_each:
        return None
    correlations = _resampled_correlations(lessons, draws(len(lessons), resamples))
    return interval_of_statistic(correlation, correlations, without_each, LEAST_FOR_CORRELATIONS)


def _resampled_correlations(lessons: Sequence[Sequence[tuple[float, float]]], drawn: np.ndarray) -> list[float]:
    """The rank correlations of all resamples that have one; `drawn` has how often each holds each lesson, with shape
    (resamples, lessons)."""
    weights = np.repeat(drawn.astype(float), [len(lesson) for lesson in lessons], axis=1)
    centred, has_one = [], np.full(len(drawn), True)
    for side in zip(*(pair for lesson in lessons for pair in lesson), strict=True):
        values, positions = np.unique(np.array(side, dtype=float), return_inverse=True)
        counts = weights @ np.eye(len(values))[positions]
        has_one &= (counts > 0).sum(axis=1) > 1
        ranks = (np.cumsum(counts, axis=1) - (counts - 1) / 2)[:, positions]
        centred.append(ranks - (weights.sum(axis=1, keepdims=True) + 1) / 2)
    first, second = (column[has_one] for column in centred)
    weights = weights[has_one]
    products = [
        (weights * one * other).sum(axis=1) for one, other in ((first, second), (first, first), (second, second))
    ]
    return (products[0] / np.sqrt(products[1] * products[2])).tolist()


def rank_correlation_p(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> Optional[float]:
    """Compute the two-sided p of a permutation test of the rank correlation: the probability of a correlation at least
    as far from 0 if the sign of each lesson's contribution were random. None without a correlation.

    The pairs of one lesson resemble each other, so they are not shuffled one by one: a few lessons that differ would
    then look like a correlation.
    """
    all_pairs = [pair for group in pairs.values() for pair in group]
    if rank_correlation(all_pairs) is None:
        return None
    first, second = (_ranks(side) for side in zip(*all_pairs, strict=True))
    contributions = (first - first.mean()) * (second - second.mean())
    ends = np.cumsum([len(group) for group in pairs.values()])[:-1]
    contributions /= np.abs(contributions).max()  # a scale that fits the absolute tolerance of `sign_flip_p`
    return sign_flip_p([float(part.sum()) for part in np.split(contributions, ends)])


def krippendorff_alpha(units: Sequence[Sequence[Optional[float]]]) -> Optional[float]:
    """Compute Krippendorff's α for interval data (Krippendorff, "Content Analysis", 2004, chapter 11):
    1 − observed / expected disagreement. 1 is full agreement, 0 is agreement by chance.

    Args:
        units: for each conversation the score of each judge, None if the judge has none.

    Returns:
        None if no conversation has two scores, or all scores are the same.
    """
    scores_by_unit = [[value for value in unit if value is not None] for unit in units]
    scores_by_unit = [values for values in scores_by_unit if len(values) > 1]
    all_scores = np.array([value for values in scores_by_unit for value in values], dtype=float)
    n = len(all_scores)
    if n == 0 or not np.ptp(all_scores):
        return None
    units_as_arrays = (np.array(values, dtype=float) for values in scores_by_unit)
    observed = sum(_squared_differences(values) / (len(values) - 1) for values in units_as_arrays) / n
    return float(1 - observed / (_squared_differences(all_scores) / (n * (n - 1))))


def _squared_differences(values: np.ndarray) -> float:
    """Sum the squared differences over all ordered pairs of values."""
    return float(2 * (len(values) * np.sum(values**2) - np.sum(values) ** 2))


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Rank the values from 1; equal values share their mean rank."""
    _, positions, counts = np.unique(np.array(values, dtype=float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[positions]


def confusion_by_group(
    human_labels: Sequence[int], judge_labels: Sequence[int], groups: Sequence[str], categories: int
) -> np.ndarray:
    """Count, for each group, how often people gave category i and a judge category j.

    Args:
        groups: the group of each label. Labels of one group are resampled together, such as the replies to a dialogue.
        categories: the number of categories.

    Returns:
        Tables of shape (groups, categories, categories).
    """
    indices = {name: index for index, name in enumerate(dict.fromkeys(groups))}
    tables = np.zeros((len(indices), categories, categories))
    for human, judge, group in zip(human_labels, judge_labels, groups, strict=True):
        tables[indices[group], int(human), int(judge)] += 1  # numpy would take booleans as a mask
    return tables


def disagreement_weights(categories: int, ordinal: bool) -> np.ndarray:
    """Return the weight of each confusion, of shape (categories, categories): 0 for agreement, else 1, or for ordered
    categories the squared distance as a share of the largest (Cohen, "Weighted kappa", 1968)."""
    indices = np.arange(categories)
    distances = np.abs(indices[:, None] - indices[None, :])
    return (distances / (categories - 1)) ** 2 if ordinal else (distances > 0).astype(float)


def weighted_kappa(tables: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute Cohen's kappa of confusion tables of shape (…, k, k): 1 − observed / expected disagreement. 1 is full
    agreement, 0 is agreement by chance. It is also 0 if both sides always give one and the same category."""
    tables = np.asarray(tables, float)
    total = tables.sum(axis=(-1, -2))
    expected = tables.sum(axis=-1)[..., :, None] * tables.sum(axis=-2)[..., None, :]
    observed, chance = (np.sum(weights * counts, axis=(-1, -2)) for counts in (tables, expected))
    # `expected` has the scale total², hence the factor; its weighted sum is 0 if both sides give only one category
    with np.errstate(invalid="ignore", divide="ignore"):
        kappa = 1 - observed * total / chance
    return np.where(chance > 0, kappa, 0.0)


def macro_f1(tables: np.ndarray) -> np.ndarray:
    """Compute the macro-averaged F1 of confusion tables of shape (…, k, k): the mean F1 of the categories. A category
    that neither side gives is left out, as scikit-learn's `f1_score(average="macro")` does; 0 for an empty table."""
    tables = np.asarray(tables, float)
    true_positives = np.diagonal(tables, axis1=-2, axis2=-1)
    counts = tables.sum(axis=-1) + tables.sum(axis=-2)
    occurring = (counts > 0).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = np.where(counts > 0, 2 * true_positives / counts, 0.0).sum(axis=-1) / occurring
    return np.where(occurring > 0, scores, 0.0)


def resampled(tables: np.ndarray) -> np.ndarray:
    """Sum tables of shape (groups, …) over all groups, over the groups of each of `RESAMPLES` bootstrap samples, and
    over all groups but one, for each of them. The result has shape (1 + RESAMPLES + groups, …)."""
    flat = tables.reshape(len(tables), -1)
    total = flat.sum(axis=0)
    sums = np.concatenate([total[None], draws(len(tables), RESAMPLES) @ flat, total - flat])
    return sums.reshape(-1, *tables.shape[1:])


def interval_of(values: np.ndarray) -> Optional[list[float]]:
    """Compute the 95 % interval of a statistic from its values on `resampled` tables."""
    return interval_of_statistic(float(values[0]), values[1 : RESAMPLES + 1], values[RESAMPLES + 1 :])
