"""Measures rules and classifiers on messages that they were not fitted to: Cohen's kappa with people, with an interval
from a bootstrap over lessons.

Messages of one lesson resemble each other, so each resample draws lessons, and takes all messages of each.

All messages of a lesson are in one fold. A classifier's threshold is chosen inside of the training part, by a second
cross-validation there; its other settings are fixed. So nothing is tuned on the fold that is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from classroom_rl.errors import DataError
from classroom_rl.judges.moves.classifier import Counted, fit_linear, seen, texts_of
from classroom_rl.judges.moves.labelled import LABELS_OF, LabelledMessage
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.readings import REVEALS_ANSWER, Exchange
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


OUTER_FOLDS, INNER_FOLDS = 10, 4
_SEED = 0
_THRESHOLDS = 60

BY_RULES, BY_CLASSIFIER, BY_RULES_WITH_TARGET = KINDS = ("rules", "classifier", "rules_with_target")
"""What reads a label. `rules_with_target`: the rules where the target is known, else the classifier."""

CANDIDATES = {REVEALS_ANSWER: KINDS}
"""What is tried for a label; for all others the first two of `KINDS`."""


@dataclass(frozen=True)
class Measured:
    """How well a label is read.

    Attributes:
        label, source: the label, and the data set that has it.
        chosen: what agrees best with people, one of `KINDS`.
        agreements: each of `KINDS` that was tried, and its agreement with people.
        found: each of them, and what it read in each message.
        gain: kappa of what was chosen minus that of the rules, and its 95 % interval.
        threshold: the threshold for a classifier that is fitted to all messages.
    """

    label: str
    source: str
    chosen: str
    agreements: dict[str, Agreement]
    found: dict[str, np.ndarray]
    gain: tuple[float, list[float] | None]
    threshold: float


def measure(messages: Sequence[LabelledMessage], folds: int = OUTER_FOLDS) -> dict[str, Measured]:
    """Measure rules and classifiers on labelled messages, for each label that they have.

    Raises:
        DataError: if a data set has fewer lessons than folds, or a label that is always or never given in a fold's
            training part.
    """
    found = {}
    for source, labels in LABELS_OF.items():
        there = [each for each in messages if each.source == source]
        if there:
            found |= _measure_source(source, labels, there, folds)
    return found


def _measure_source(
    source: str, labels: Sequence[str], messages: Sequence[LabelledMessage], folds: int
) -> dict[str, Measured]:
    lessons = [each.lesson for each in messages]
    if len(set(lessons)) < folds:
        raise DataError(
            f"The {len(messages)} messages of {source} are from {len(set(lessons))} lessons; a cross-validation with "
            f"{folds} folds needs at least as many. Give more data, or fewer --folds."
        )
    found = {}
    for texts in dict.fromkeys(map(texts_of, labels)):
        together = [label for label in labels if texts_of(label) == texts]
        rows = [seen(together[0], each.exchange) for each in messages]
        given = {label: np.array([each.labels[label] for each in messages]) for label in together}
        scores, read = _out_of_fold(rows, given, lessons, texts, folds)
        for label in together:
            found[label] = _compare(source, label, messages, scores[label], read[label])
    return found


def _compare(
    source: str, label: str, messages: Sequence[LabelledMessage], scores: np.ndarray, read: np.ndarray
) -> Measured:
    given = np.array([each.labels[label] for each in messages])
    lessons = [each.lesson for each in messages]
    rules = np.array([RULES[label](seen(label, each.exchange)) for each in messages])
    known = np.array([bool(each.exchange.target) for each in messages])
    all_found = dict(zip(KINDS, (rules, read, np.where(known, rules, read)), strict=True))
    found = {kind: all_found[kind] for kind in CANDIDATES.get(label, KINDS[:2])}
    agreements = {kind: agreement(given, each, lessons) for kind, each in found.items()}
    chosen = max(agreements, key=lambda kind: agreements[kind].kappa)
    gain = difference(given, found[chosen], rules, lessons)
    return Measured(label, source, chosen, agreements, found, gain, best_threshold(given, scores))


def _out_of_fold(
    rows: Sequence[Exchange], given: Mapping[str, np.ndarray], lessons: Sequence[str], texts: Sequence[str], folds: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """For each label the score of each message by a classifier that has not seen its lesson, and whether that is above
    the classifier's threshold."""
    counted = Counted(rows, texts)
    scores = {label: np.zeros(len(rows)) for label in given}
    read = {label: np.zeros(len(rows), bool) for label in given}
    for train, test in _folds(lessons, folds, _SEED):
        inner = {label: np.zeros(len(train)) for label in given}
        for fitted, held_out in _folds([lessons[place] for place in train], INNER_FOLDS, _SEED + 1):
            for label, values in _score(counted, given, train[fitted], train[held_out]).items():
                inner[label][held_out] = values
        for label, values in _score(counted, given, train, test).items():
            scores[label][test] = values
            read[label][test] = values >= best_threshold(given[label][train], inner[label])
    return scores, read


def _folds(lessons: Sequence[str], folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    from sklearn.model_selection import GroupKFold

    return list(GroupKFold(folds, shuffle=True, random_state=seed).split(lessons, groups=lessons))


def _score(
    counted: Counted, given: Mapping[str, np.ndarray], train: np.ndarray, test: np.ndarray
) -> dict[str, np.ndarray]:
    """For each label the scores of the messages at `test`, by a classifier that is fitted to those at `train`."""
    learned, measured = counted.tables(train, test)
    found = {}
    for label, values in given.items():
        check_both_occur(label, values[train])
        found[label] = fit_linear(learned, values[train]).scores(measured)
    return found


def check_both_occur(label: str, given: np.ndarray) -> None:
    """Raise a `DataError` if a label is always given, or never: then there is nothing to learn."""
    if given.all() or not given.any():
        often = "always" if given.all() else "never"
        raise DataError(
            f"The label {label} is {often} given in the {len(given)} messages that a classifier is to be fitted to: "
            "give data in which people gave it to some messages and not to others."
        )


def best_threshold(given: np.ndarray, scores: np.ndarray) -> float:
    """The score from which on a message gets the label, so that the kappa with people is highest."""
    tried = np.unique(np.quantile(scores, np.linspace(0.02, 0.98, _THRESHOLDS)))
    return float(max(tried, key=lambda threshold: kappa(given, scores >= threshold)))
