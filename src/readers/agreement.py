"""Cohen's kappa between a reader and people, with an interval from a bootstrap over lessons.

Messages of one lesson resemble each other, so each resample draws lessons, and takes all messages of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from src.rollout.intervals import draws

RESAMPLES = 10_000


@dataclass(frozen=True)
class Agreement:
    """A reader's agreement with people on some messages.

    Attributes:
        kappa: Cohen's kappa, 0 by chance and 1 in full agreement; 0 if one side always says the same.
        ci95: its 95 % interval.
        precision: of the messages that the reader gave the label, the share that people gave it, too; None without any.
        recall: of the messages that people gave the label, the share that the reader gave it, too; None without any.
        base_rate: the share of the messages that people gave the label.
        messages, lessons: how many there were.
    """

    kappa: float
    ci95: tuple[float, float]
    precision: float | None
    recall: float | None
    base_rate: float
    messages: int
    lessons: int


def agreement(labels: Sequence[bool], found: Sequence[bool], lessons: Sequence[str]) -> Agreement:
    """How far `found` agrees with `labels`, message by message; `lessons` names the lesson of each."""
    tables = _tables(labels, found, lessons)
    _, alone, missed, both = total = tables.sum(axis=0)
    low, high = np.percentile(_kappas(_drawn(tables)), [2.5, 97.5])
    return Agreement(
        float(_kappas(total)),
        (float(low), float(high)),
        float(both / (both + alone)) if both + alone else None,
        float(both / (both + missed)) if both + missed else None,
        float((both + missed) / total.sum()),
        int(total.sum()),
        len(tables),
    )


def difference(
    labels: Sequence[bool], found: Sequence[bool], other: Sequence[bool], lessons: Sequence[str]
) -> tuple[float, tuple[float, float]]:
    """The kappa of `found` minus that of `other`, on the same messages, with its 95 % interval."""
    one, two = (_tables(labels, each, lessons) for each in (found, other))
    low, high = np.percentile(_kappas(_drawn(one)) - _kappas(_drawn(two)), [2.5, 97.5])
    return float(_kappas(one.sum(axis=0)) - _kappas(two.sum(axis=0))), (float(low), float(high))


def kappa(labels: np.ndarray, found: np.ndarray) -> float:
    """Cohen's kappa (Cohen, "A coefficient of agreement for nominal scales", 1960)."""
    return float(_kappas(np.bincount(2 * np.asarray(labels, int) + np.asarray(found, int), minlength=4)))


def _tables(labels: Sequence[bool], found: Sequence[bool], lessons: Sequence[str]) -> np.ndarray:
    """For each lesson how many messages nobody labelled, the reader alone, people alone, and both."""
    names = {name: place for place, name in enumerate(dict.fromkeys(lessons))}
    tables = np.zeros((len(names), 4))
    for label, value, lesson in zip(labels, found, lessons, strict=True):
        tables[names[lesson], 2 * bool(label) + bool(value)] += 1
    return tables


def _drawn(tables: np.ndarray) -> np.ndarray:
    return draws(len(tables), RESAMPLES) @ tables


def _kappas(counts: np.ndarray) -> np.ndarray:
    """Kappa of tables (…, 4), with their cells as in `_tables`."""
    nobody, alone, missed, both = np.moveaxis(np.asarray(counts, float), -1, 0)
    total = nobody + alone + missed + both
    by_people, by_reader = (missed + both) / total, (alone + both) / total
    chance = by_people * by_reader + (1 - by_people) * (1 - by_reader)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = ((nobody + both) / total - chance) / (1 - chance)
    return np.where(chance < 1, found, 0.0)
