"""Agreement of judges with human labels of replies, per dimension, with intervals over dialogues.

Replies to one dialogue resemble each other, so each bootstrap resample draws dialogues and takes all replies to each.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np

from classroom_rl.evaluation.published.mrbench import DIMENSIONS, LabelledReply
from classroom_rl.judges.moves.cross_validation import agreement
from classroom_rl.results.agreement import (
    confusion_by_group,
    disagreement_weights,
    interval_of,
    resampled,
    weighted_kappa,
)
from classroom_rl.rollout.intervals import mean_with_ci

ReplyLabels = Sequence[Mapping[str, str | bool] | None]
"""For each reply a judge's labels by dimension: an answer, or a bool from a judge that only distinguishes yes and no.
None means no verdict."""


def judge_agreement(replies: Sequence[LabelledReply], labels: ReplyLabels) -> dict[str, Any]:
    """A judge's agreement with the human labels.

    Returns:
        `dimensions`: for each dimension that the judge answers, over `replies` in `dialogues`:
        `kappa` (`weights`: quadratic for ordered answers, else none) with `ci95`, `accuracy`, and `yes`: the agreement
        on yes against all other answers. A judge that only answers yes or no has `yes` alone.
        `not_answered`: the other dimensions. `mean_kappa`: over all dimensions, for a judge that answers all.
    """
    judged = [
        (reply, reply_labels) for reply, reply_labels in zip(replies, labels, strict=True) if reply_labels is not None
    ]
    answered = [name for name in DIMENSIONS if any(name in reply_labels for _, reply_labels in judged)]
    dimensions = {name: _of_dimension(name, judged) for name in answered}
    return {
        "dimensions": dimensions,
        "not_answered": [name for name in DIMENSIONS if name not in answered],
        "mean_kappa": _mean_kappa(judged) if _answers_all(judged) else None,
    }


def people_answers(replies: Sequence[LabelledReply]) -> dict[str, Any]:
    """The human labels in each dimension: the `commonest` answer, its `share` of the replies (the accuracy of always
    giving it), and the share of `yes`."""
    answers = {}
    for name, dimension in DIMENSIONS.items():
        labels = [reply.labels[name] for reply in replies]
        answer, count = Counter(labels).most_common(1)[0]
        yes = sum(label in dimension.yes for label in labels) / len(labels)
        answers[name] = {"commonest": answer, "share": count / len(labels), "yes": yes}
    return answers


def _of_dimension(name: str, judged: Sequence[tuple[LabelledReply, Mapping[str, str | bool]]]) -> dict[str, Any]:
    dimension = DIMENSIONS[name]
    people_labels = [reply.labels[name] for reply, _ in judged]
    judge_labels = [labels[name] for _, labels in judged]
    dialogues = [reply.history for reply, _ in judged]
    judge_yes = [value if isinstance(value, bool) else value in dimension.yes for value in judge_labels]
    result: dict[str, Any] = {"replies": len(people_labels), "dialogues": len(set(dialogues))}
    if not isinstance(judge_labels[0], bool):
        tables, weights = _tables(name, judged), disagreement_weights(len(dimension.answers), dimension.ordinal)
        right: dict[str, list[float]] = {}
        for label, value, dialogue in zip(people_labels, judge_labels, dialogues, strict=True):
            right.setdefault(dialogue, []).append(float(label == value))
        result |= {
            "kappa": float(weighted_kappa(tables.sum(axis=0), weights)),
            "ci95": interval_of(weighted_kappa(resampled(tables), weights)),
            "weights": "quadratic" if dimension.ordinal else "none",
            "accuracy": mean_with_ci(right),
        }
    people_yes = [label in dimension.yes for label in people_labels]
    result["yes"] = agreement_as_json(people_yes, judge_yes, dialogues)
    return result


def agreement_as_json(labels: Sequence[bool], found: Sequence[bool], dialogues: Sequence[str]) -> dict[str, Any] | None:
    """A yes-or-no agreement for metrics.json; None without replies."""
    return asdict(agreement(labels, found, dialogues)) if len(labels) else None


def kappa_differences(replies: Sequence[LabelledReply], by_judge: Mapping[str, ReplyLabels]) -> list[dict[str, Any]]:
    """The mean kappa over all dimensions of each judge minus that of each judge before it, on the replies that both
    labelled, with its interval. Judges that do not answer all dimensions are left out.

    Returns:
        {"judge", "against", "mean", "ci95", "replies"} of each pair.
    """
    differences = []
    for (before, first), (judge, second) in combinations(by_judge.items(), 2):
        shared = [index for index in range(len(replies)) if first[index] is not None and second[index] is not None]
        pairs = [[(replies[index], labels[index]) for index in shared] for labels in (first, second)]
        if not shared or not all(map(_answers_all, pairs)):
            continue
        (one, ones), (two, twos) = map(_kappas, pairs)
        interval = interval_of(twos.mean(axis=0) - ones.mean(axis=0))
        mean = float(two.mean() - one.mean())
        differences.append({"judge": judge, "against": before, "mean": mean, "ci95": interval, "replies": len(shared)})
    return differences


def _answers_all(judged: Sequence[tuple[LabelledReply, Mapping[str, str | bool]]]) -> bool:
    return bool(judged) and all(isinstance(judged[0][1].get(name), str) for name in DIMENSIONS)


def _mean_kappa(judged: Sequence[tuple[LabelledReply, Mapping[str, str | bool]]]) -> dict[str, Any]:
    kappas, drawn = _kappas(judged)
    return {"mean": float(kappas.mean()), "ci95": interval_of(drawn.mean(axis=0))}


def _kappas(judged: Sequence[tuple[LabelledReply, Mapping[str, str | bool]]]) -> tuple[np.ndarray, np.ndarray]:
    """Each dimension's kappa, shape (dimensions,), and its kappas over resampled dialogues, shape (dimensions,
    resamples)."""
    kappas, drawn = [], []
    for name, dimension in DIMENSIONS.items():
        tables, weights = _tables(name, judged), disagreement_weights(len(dimension.answers), dimension.ordinal)
        kappas.append(weighted_kappa(tables.sum(axis=0), weights))
        drawn.append(weighted_kappa(resampled(tables), weights))
    return np.array(kappas), np.array(drawn)


def _tables(name: str, judged: Sequence[tuple[LabelledReply, Mapping[str, str | bool]]]) -> np.ndarray:
    """The confusion matrix of each dialogue, shape (dialogues, answers, answers)."""
    index_of = DIMENSIONS[name].answers.index
    people_labels = [index_of(reply.labels[name]) for reply, _ in judged]
    judge_labels = [index_of(labels[name]) for _, labels in judged]
    dialogues = [reply.history for reply, _ in judged]
    return confusion_by_group(people_labels, judge_labels, dialogues, len(DIMENSIONS[name].answers))
