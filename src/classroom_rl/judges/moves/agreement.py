"""Cohen's kappa between a reader and people, with an interval from a bootstrap over lessons.

Messages of one lesson resemble each other, so each resample draws lessons, and takes all messages of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from classroom_rl.rollout.intervals import draws, interval_of_statistic

RESAMPLES = 10_000


@dataclass(frozen=True)
class Agreement:
    """A reader's agreement with people on some messages.

    Attributes:
        kappa: Cohen's kappa, 0 by chance and 1 in full agreement; 0 if one side always says the same.
        ci95: its 95 % interval; None for fewer than 30 lessons (`classroom_rl.rollout.intervals`).
        precision: of the messages that the reader gave the label, the share that people gave it, too; None without any.
        recall: of the messages that people gave the label, the share that the reader gave it, too; None without any.
        base_rate: the share of the messages that people gave the label.
        messages, lessons: how many there were.
    """

    kappa: float
    ci95: list[float] | None
    precision: float | None
    recall: float | None
    base_rate: float
    messages: int
    lessons: int


def agreement(labels: Sequence[bool], found: Sequence[bool], lessons: Sequence[str]) -> Agreement:
    """How far `found` agrees with `labels`, message by message; `lessons` names the lesson of each."""
    tables = _tables(labels, found, lessons)
    _, alone, missed, both = total = tables.sum(axis=0)
    value = float(_kappas(total))
    return Agreement(
        value,
        interval_of_statistic(value, _kappas(_drawn(tables)), _kappas(total - tables)),
        float(both / (both + alone)) if both + alone else None,
        float(both / (both + missed)) if both + missed else None,
        float((both + missed) / total.sum()),
        int(total.sum()),
        len(tables),
    )


def difference(
    labels: Sequence[bool], found: Sequence[bool], other: Sequence[bool], lessons: Sequence[str]
) -> tuple[float, list[float] | None]:
    """The kappa of `found` minus that of `other`, on the same messages, with its 95 % interval.
    None, as of `Agreement`, for fewer than 30 lessons."""
    one, two = (_tables(labels, each, lessons) for each in (found, other))

    def gap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return _kappas(first) - _kappas(second)

    value = float(gap(one.sum(axis=0), two.sum(axis=0)))
    without_each = gap(one.sum(axis=0) - one, two.sum(axis=0) - two)
    return value, interval_of_statistic(value, gap(_drawn(one), _drawn(two)), without_each)


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
    with np.errstate(invalid="ignore", divide="ignore"):
        by_people, by_reader = (missed + both) / total, (alone + both) / total
        chance = by_people * by_reader + (1 - by_people) * (1 - by_reader)
        found = ((nobody + both) / total - chance) / (1 - chance)
    return np.where(chance < 1, found, 0.0)
