"""How far two judges agree."""

from collections.abc import Sequence
from typing import Optional

import numpy as np


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> Optional[float]:
    """Spearman's: the correlation of the ranks, equal values sharing the mean of theirs. None for fewer than three
    pairs, or where one side gives all the same score."""
    if len(pairs) < 3:
        return None
    first, second = (_ranks(side) for side in zip(*pairs, strict=True))
    if not (np.ptp(first) and np.ptp(second)):
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.array(values, dtype=float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
