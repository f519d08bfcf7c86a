"""Evaluates rules and classifiers on held-out messages: Cohen's kappa with human annotators, and its bootstrap
confidence interval over lessons.

Messages of one lesson resemble each other, so each bootstrap resample draws whole lessons, and all messages of a lesson
are in the same fold.

The cross-validation is nested: an inner cross-validation on the training part chooses the threshold of a classifier;
its other hyperparameters are fixed. So nothing is tuned on the held-out fold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from classroom_rl.errors import DataError
from classroom_rl.judges.agreement import (
    confusion_by_group,
    disagreement_weights,
    interval_of,
    resampled,
    weighted_kappa,
)
from classroom_rl.judges.moves.classifier import Counted, fit_linear, seen, texts_of
from classroom_rl.judges.moves.labelled import LABELS_OF, LabelledMessage
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.readings import LABELS, REVEALS_ANSWER, Exchange

_UNWEIGHTED = disagreement_weights(2, ordinal=False)


@dataclass(frozen=True)
class Agreement:
    """Agreement of predicted labels with those of human annotators.

    Attributes:
        kappa: Cohen's kappa: 1 in full agreement, 0 at chance level. Defined as 0 where chance agreement is 1, because
            both sides always give the same label.
        ci95: the 95 % confidence interval of kappa; None for fewer than 30 lessons (`classroom_rl.rollout.intervals`).
        precision: the share of correct predictions among the predicted positives; None without any.
        recall: the share of the annotators' positives that were predicted; None without any.
        base_rate: the share of the messages that annotators gave the label.
        messages, lessons: the numbers of messages and lessons.
    """

    kappa: float
    ci95: list[float] | None
    precision: float | None
    recall: float | None
    base_rate: float
    messages: int
    lessons: int


def agreement(labels: Sequence[bool], predictions: Sequence[bool], lessons: Sequence[str]) -> Agreement:
    """The agreement of the predictions with the annotators' labels, of each message, in these `lessons`."""
    tables = confusion_by_group(labels, predictions, lessons, 2)
    (_, false_positives), (false_negatives, true_positives) = tables.sum(axis=0)
    predicted, positives = true_positives + false_positives, true_positives + false_negatives
    kappas = weighted_kappa(resampled(tables), _UNWEIGHTED)
    return Agreement(
        float(kappas[0]),
        interval_of(kappas),
        float(true_positives / predicted) if predicted else None,
        float(true_positives / positives) if positives else None,
        float(positives / tables.sum()),
        int(tables.sum()),
        len(tables),
    )


def difference(
    labels: Sequence[bool], predictions: Sequence[bool], other: Sequence[bool], lessons: Sequence[str]
) -> tuple[float, list[float] | None]:
    """The kappa of `predictions` minus that of the predictions `other`, on the same messages, with the 95 %
    confidence interval of the difference (None for fewer than 30 lessons)."""
    first, second = (
        weighted_kappa(resampled(confusion_by_group(labels, predicted, lessons, 2)), _UNWEIGHTED)
        for predicted in (predictions, other)
    )
    return float(first[0] - second[0]), interval_of(first - second)


def kappa(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Cohen's kappa (Cohen, "A coefficient of agreement for nominal scales", 1960)."""
    counts = np.bincount(2 * np.asarray(labels, int) + np.asarray(predictions, int), minlength=4)
    return float(weighted_kappa(counts.reshape(2, 2), _UNWEIGHTED))


OUTER_FOLDS, INNER_FOLDS = 10, 4
_SEED = 0
_THRESHOLDS = 60

BY_RULES, BY_CLASSIFIER, BY_RULES_WITH_TARGET = KINDS = ("rules", "classifier", "rules_with_target")
"""What predicts a label. `rules_with_target`: the rules where the target is known, else the classifier."""

CANDIDATES = {REVEALS_ANSWER: KINDS} | dict.fromkeys(LABELS.keys() - RULES.keys(), (BY_CLASSIFIER,))
"""The kinds that are compared for a label: a classifier alone where there is no rule; for all other labels, the first
two of `KINDS`."""


@dataclass(frozen=True)
class Measured:
    """The evaluation of a label.

    Attributes:
        label, source: the label, and the data set that provides it.
        chosen: the kind with the highest kappa, one of `KINDS`.
        agreements: the agreement with annotators of each kind that was compared.
        found: the out-of-fold predictions of each kind, of shape (messages,).
        gain: the kappa of the chosen kind minus that of the rules (0 without any), and its 95 % confidence interval.
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
    """Evaluate rules and classifiers on labelled messages by cross-validation, for each label of their data sets.

    Raises:
        DataError: if a data set has fewer lessons than folds, or if a label is always or never given in the training
            part of a fold.
    """
    measured = {}
    for source, labels in LABELS_OF.items():
        of_source = [message for message in messages if message.source == source]
        if of_source:
            measured |= _measure_source(source, labels, of_source, folds)
    return measured


def _measure_source(
    source: str, labels: Sequence[str], messages: Sequence[LabelledMessage], folds: int
) -> dict[str, Measured]:
    lessons = [message.lesson for message in messages]
    if len(set(lessons)) < folds:
        raise DataError(
            f"The {len(messages)} messages of {source} are from {len(set(lessons))} lessons; a cross-validation with "
            f"{folds} folds needs at least as many. Give more data, or fewer --folds."
        )
    measured = {}
    for texts in dict.fromkeys(map(texts_of, labels)):  # labels on the same texts share the n-gram counts
        group = [label for label in labels if texts_of(label) == texts]
        exchanges = [seen(group[0], message.exchange) for message in messages]
        targets = {label: np.array([message.labels[label] for message in messages]) for label in group}
        scores, predictions = _out_of_fold(exchanges, targets, lessons, texts, folds)
        for label in group:
            measured[label] = _compare(source, label, messages, scores[label], predictions[label])
    return measured


def _compare(
    source: str, label: str, messages: Sequence[LabelledMessage], scores: np.ndarray, predictions: np.ndarray
) -> Measured:
    targets = np.array([message.labels[label] for message in messages])
    lessons = [message.lesson for message in messages]
    rule = RULES.get(label, lambda exchange: False)
    by_rules = np.array([rule(seen(label, message.exchange)) for message in messages])
    has_target = np.array([bool(message.exchange.target) for message in messages])
    predictions_by_kind = dict(
        zip(KINDS, (by_rules, predictions, np.where(has_target, by_rules, predictions)), strict=True)
    )
    candidates = {kind: predictions_by_kind[kind] for kind in CANDIDATES.get(label, KINDS[:2])}
    agreements = {kind: agreement(targets, predicted, lessons) for kind, predicted in candidates.items()}
    chosen = max(agreements, key=lambda kind: agreements[kind].kappa)
    gain = difference(targets, candidates[chosen], by_rules, lessons)
    return Measured(label, source, chosen, agreements, candidates, gain, best_threshold(targets, scores))


def _out_of_fold(
    exchanges: Sequence[Exchange],
    targets: Mapping[str, np.ndarray],
    lessons: Sequence[str],
    texts: Sequence[str],
    folds: int,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """For each label, the score of each message by a classifier that was not trained on its lesson, and whether the
    score reaches the threshold of this classifier."""
    counts = Counted(exchanges, texts)
    scores = {label: np.zeros(len(exchanges)) for label in targets}
    predictions = {label: np.zeros(len(exchanges), bool) for label in targets}
    for train, test in folds_by_lesson(lessons, folds, _SEED):
        # Inner folds of the training lessons choose the threshold, so that no test lesson has a say in it.
        inner_scores = {label: np.zeros(len(train)) for label in targets}
        for inner_train, inner_test in folds_by_lesson([lessons[index] for index in train], INNER_FOLDS, _SEED + 1):
            for label, values in _score(counts, targets, train[inner_train], train[inner_test]).items():
                inner_scores[label][inner_test] = values
        for label, values in _score(counts, targets, train, test).items():
            scores[label][test] = values
            predictions[label][test] = values >= best_threshold(targets[label][train], inner_scores[label])
    return scores, predictions


def folds_by_lesson(lessons: Sequence[str], folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The indices (train, test) of each fold; all messages of a lesson are in one fold."""
    from sklearn.model_selection import GroupKFold

    return list(GroupKFold(folds, shuffle=True, random_state=seed).split(lessons, groups=lessons))


def _score(
    counted: Counted, targets: Mapping[str, np.ndarray], train: np.ndarray, test: np.ndarray
) -> dict[str, np.ndarray]:
    """For each label, the scores of the messages at the indices `test` by a classifier that is fitted to those at
    `train`."""
    train_tables, test_tables = counted.tables(train, test)
    scores = {}
    for label, values in targets.items():
        check_both_occur(label, values[train])
        scores[label] = fit_linear(train_tables, values[train]).scores(test_tables)
    return scores


def check_both_occur(label: str, labels: np.ndarray) -> None:
    """Raise a `DataError` if a label is always or never given, because then there is nothing to learn."""
    if labels.all() or not labels.any():
        frequency = "always" if labels.all() else "never"
        raise DataError(
            f"The label {label} is {frequency} given in the {len(labels)} messages that a classifier is to be fitted "
            "to: give data in which people gave it to some messages and not to others."
        )


def best_threshold(labels: np.ndarray, scores: np.ndarray) -> float:
    """The threshold with the highest kappa; a message gets the label if its score is at least the threshold."""
    candidates = np.unique(np.quantile(scores, np.linspace(0.02, 0.98, _THRESHOLDS)))
    return float(max(candidates, key=lambda threshold: kappa(labels, scores >= threshold)))
