"""Measures of agreement between judges."""

from collections.abc import Sequence
from typing import Optional

import numpy as np


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> Optional[float]:
    """Spearman's rank correlation; ties share their mean rank. None for fewer than three pairs, or if all scores of one
    side are equal."""
    if len(pairs) < 3:
        return None
    first, second = (_ranks(side) for side in zip(*pairs, strict=True))
    if not (np.ptp(first) and np.ptp(second)):
        return None
    return float(np.corrcoef(first, second)[0, 1])


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
