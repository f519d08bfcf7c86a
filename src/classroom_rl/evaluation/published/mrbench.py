"""MRBench: judges label tutors' replies to a student's mistake in maths on eight dimensions, and are compared with the
people who labelled them.

Maurya et al., "Unifying AI Tutor Evaluation", NAACL 2025. Three file formats are read: the published one of V1 and V2,
a conversation with the replies of several tutors; that of V3, which labels four dimensions or none (`bea2025.py`); and
a flat one with one reply per row (docs/evaluation.md).

Intervals are over dialogues: replies to one dialogue resemble each other, so each bootstrap resample draws dialogues
and takes all replies to each.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from classroom_rl.config.benchmark import JUDGE, BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.values import EMBEDDED_JUDGES
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.checked_rows import PublishedRow, draw, read_rows, write_rows
from classroom_rl.evaluation.published.labellers import MessageLabels, agreement_as_json, ask_judge
from classroom_rl.judges.agreement import (
    confusion_by_group,
    disagreement_weights,
    interval_of,
    resampled,
    weighted_kappa,
)
from classroom_rl.judges.moves.labelled import OF_DIMENSIONS, exchange_of_mrbench, is_unknown
from classroom_rl.judges.readings import Exchange
from classroom_rl.rollout.intervals import by_lesson, mean_with_ci
from classroom_rl.rollout.prompts import render

NO, SOMEWHAT, YES = _EXTENT = ("no", "to some extent", "yes")
INCORRECT, CORRECT = "yes, incorrect", "yes, correct"
OFFENSIVE, NEUTRAL, ENCOURAGING = _TONES = ("offensive", "neutral", "encouraging")


@dataclass(frozen=True)
class Dimension:
    """One of the eight questions about a reply.

    Attributes:
        answers: the possible answers; from least to most if `ordinal`.
        yes: the answers that count as yes where only yes and no are distinguished.
    """

    answers: tuple[str, ...] = _EXTENT
    yes: frozenset[str] = frozenset({YES})
    ordinal: bool = True


DIMENSIONS = {
    "mistake_identification": Dimension(),
    "mistake_location": Dimension(),
    "revealing_of_the_answer": Dimension((NO, INCORRECT, CORRECT), frozenset({INCORRECT, CORRECT}), ordinal=False),
    "providing_guidance": Dimension(),
    "actionability": Dimension(),
    "coherence": Dimension(),
    "tutor_tone": Dimension(_TONES, frozenset({ENCOURAGING})),
    "humanlikeness": Dimension(),
}
"""Name in the data, in lower case → dimension."""

TRACKS = ("mistake_identification", "mistake_location", "providing_guidance", "actionability")
"""The dimensions of V3: the first four tracks of the BEA 2025 shared task."""

READ_AS = {name.lower(): label for label, name in OF_DIMENSIONS.items()}
"""Dimension → the label of `classroom_rl.judges.readings` that corresponds to its yes."""

_REVEALS = re.compile(r"yes \((?:and|but) the (?:revealed )?answer is (in)?correct\)")


class _Annotated(PublishedRow):
    response: str
    annotation: dict[str, str | None]


class _Conversation(PublishedRow):
    """A row as published. Loaded as a table, a tutor without a reply to this conversation is null."""

    conversation_id: str
    conversation_history: str
    Ground_Truth_Solution: str
    anno_llm_responses: dict[str, _Annotated | None]


class _Response(PublishedRow):
    response: str
    annotation: dict[str, str | None] = Field(default_factory=dict)


class _V3Conversation(PublishedRow):
    """A row of V3, which has no solution; the blind test set has no annotations either."""

    conversation_id: str
    conversation_history: str
    tutor_responses: dict[str, _Response | None]


class _Flat(PublishedRow):
    history: str
    solution: str
    tutor: str
    labels: dict[str, str | None]
    id: str = ""


@dataclass(frozen=True)
class LabelledReply:
    """A tutor's reply with people's labels.

    Attributes:
        history: the conversation before it, as one text, which also names the dialogue.
        solution: the problem's solution; "" if unknown.
        labels: people's answer in each of `DIMENSIONS`; of V3, in each of `TRACKS`, or {} in its blind test set.
        exchange: the reply with its context, as input of a move classifier.
    """

    id: str
    history: str
    solution: str
    text: str
    labels: Mapping[str, str]
    exchange: Exchange


def read_mrbench(name: str, split: str) -> list[LabelledReply]:
    """Read the labelled replies of a file, or of a data set on the Hub. Raises `DataError`, naming file, row and field,
    if it cannot be read or is empty."""
    rows = read_rows(name, split, _Conversation, _V3Conversation, _Flat)
    replies = [reply for where, row in rows for reply in _replies(where, row)]
    if not replies:
        raise DataError(f"{name} holds no labelled reply.")
    return replies


def _replies(where: str, row: _Conversation | _V3Conversation | _Flat) -> Iterator[LabelledReply]:
    if isinstance(row, _Flat):
        yield _reply(row.id or where, f"{where}: field labels", row.history, row.solution, row.tutor, row.labels)
        return
    if isinstance(row, _V3Conversation):
        for tutor, response in row.tutor_responses.items():
            if response is not None:
                field = f"{where}: field tutor_responses.{tutor}.annotation"
                name, dimensions = reply_id(row.conversation_id, tutor), TRACKS if response.annotation else ()
                reply_fields = (row.conversation_history, "", response.response, response.annotation)
                yield _reply(name, field, *reply_fields, dimensions)
        return
    for tutor, reply in row.anno_llm_responses.items():
        if reply is not None:
            field = f"{where}: field anno_llm_responses.{tutor}.annotation"
            reply_fields = (row.conversation_history, row.Ground_Truth_Solution, reply.response, reply.annotation)
            yield _reply(reply_id(row.conversation_id, tutor), field, *reply_fields)


def reply_id(conversation_id: str, tutor: str) -> str:
    """The id of a published reply."""
    return f"{conversation_id}-{tutor}"


def _reply(
    name: str,
    field: str,
    history: str,
    solution: str,
    text: str,
    labels: Mapping[str, str | None],
    wanted: Iterable[str] = DIMENSIONS,
) -> LabelledReply:
    labels_by_dimension = {key.lower(): value for key, value in labels.items() if value is not None}
    missing = [dimension for dimension in wanted if dimension not in labels_by_dimension]
    if missing:
        raise DataError(f"{field} has no {', '.join(missing)}; there are: {', '.join(labels)}.")
    answers = {
        dimension: _answer(f"{field}.{dimension}", dimension, labels_by_dimension[dimension]) for dimension in wanted
    }
    clean_history = "\n".join(line.strip() for line in history.replace("\xa0", " ").splitlines() if line.strip())
    shown_solution = "" if is_unknown(solution) else solution.strip()
    exchange = exchange_of_mrbench(history, solution, text)
    return LabelledReply(name, clean_history, shown_solution, text.strip(), answers, exchange)


def _answer(field: str, dimension: str, published: str) -> str:
    answer = published.strip().lower()
    if reveals := _REVEALS.fullmatch(answer):
        answer = INCORRECT if reveals[1] else CORRECT
    allowed = DIMENSIONS[dimension].answers
    if answer not in allowed:
        raise DataError(f"{field} is {published!r}, which is none of the known answers ({'; '.join(allowed)}).")
    return answer


# Agreement with people ---------------------------------------------------------------------------------------------


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
        "mean_kappa": _mean_and_interval(_mean_kappas(judged)) if _answers_all(judged) else None,
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
        kappas = _kappas(name, judged)
        correct = [label == value for label, value in zip(people_labels, judge_labels, strict=True)]
        result |= {
            "kappa": float(kappas[0]),
            "ci95": interval_of(kappas),
            "weights": "quadratic" if dimension.ordinal else "none",
            "accuracy": mean_with_ci(by_lesson(dialogues, correct)),
        }
    people_yes = [label in dimension.yes for label in people_labels]
    result["yes"] = agreement_as_json(people_yes, judge_yes, dialogues)
    return result


def kappa_differences(replies: Sequence[LabelledReply], by_judge: Mapping[str, ReplyLabels]) -> list[dict[str, Any]]:
    """The mean kappa over all dimensions of each judge minus that of each judge before it, on the replies that both
    labelled, with its interval. Judges that do not answer all dimensions are left out.

    Returns:
        {"judge", "against", "mean", "ci95", "replies"} of each pair.
    """
    differences = []
    for (against, against_labels), (judge, judge_labels) in combinations(by_judge.items(), 2):
        shared = [
            index
            for index in range(len(replies))
            if against_labels[index] is not None and judge_labels[index] is not None
        ]
        pairs = [[(replies[index], labels[index]) for index in shared] for labels in (against_labels, judge_labels)]
        if not shared or not all(map(_answers_all, pairs)):
            continue
        against_means, judge_means = map(_mean_kappas, pairs)
        estimate = _mean_and_interval(judge_means - against_means)
        differences.append({"judge": judge, "against": against, **estimate, "replies": len(shared)})
    return differences


def _answers_all(judged: Sequence[tuple[LabelledReply, Mapping[str, str | bool]]]) -> bool:
    return bool(judged) and all(isinstance(judged[0][1].get(name), str) for name in DIMENSIONS)


def _mean_and_interval(kappas: np.ndarray) -> dict[str, Any]:
    return {"mean": float(kappas[0]), "ci95": interval_of(kappas)}


def _mean_kappas(judged: Sequence[tuple[LabelledReply, Mapping[str, str | bool]]]) -> np.ndarray:
    """The mean of `_kappas` over all dimensions."""
    return np.mean([_kappas(name, judged) for name in DIMENSIONS], axis=0)


def _kappas(name: str, judged: Sequence[tuple[LabelledReply, Mapping[str, str | bool]]]) -> np.ndarray:
    """A dimension's kappa over the sets of dialogues of `resampled`, whose first are all dialogues."""
    dimension = DIMENSIONS[name]
    people_labels = [dimension.answers.index(reply.labels[name]) for reply, _ in judged]
    judge_labels = [dimension.answers.index(labels[name]) for _, labels in judged]
    dialogues = [reply.history for reply, _ in judged]
    tables = confusion_by_group(people_labels, judge_labels, dialogues, len(dimension.answers))
    return weighted_kappa(resampled(tables), disagreement_weights(len(dimension.answers), dimension.ordinal))


# Judges ------------------------------------------------------------------------------------------------------------


CHOICES = {name: dimension.answers for name, dimension in DIMENSIONS.items()}
ANSWERS_NAME = "answers.jsonl"


async def compare_judges(config: EvalConfig, benchmark: BenchmarkConfig, folder: Path) -> dict[str, Any]:
    """Have each of `judges` label every reply once, and compare its labels with the human ones. All labels are written
    to `answers.jsonl`.

    Returns:
        The entries of metrics.json: the answers of `people`, `judges`, each with its agreement, failures and costs, and
        `differences`.
    """
    all_replies = read_mrbench(benchmark.path, benchmark.split)
    if any(len(reply.labels) < len(DIMENSIONS) for reply in all_replies):
        raise DataError(
            f"{benchmark.path} is MRBench V3, which has labels in at most {len(TRACKS)} of the {len(DIMENSIONS)} "
            "dimensions: run it with --config-name bea2025."
        )
    replies = draw(all_replies, lambda reply: reply.history, benchmark.max_dialogues, config.seed)
    prompts = [judge_prompt(benchmark.prompts_paths[JUDGE], reply) for reply in replies]
    # Judges without a model come first: an error in the move classifiers shows before anything is paid.
    judges = sorted(config.judges, key=lambda judge: judge.model_name_or_path not in EMBEDDED_JUDGES)
    by_judge, about = {}, {}
    for judge in judges:
        name = judge.model_name_or_path
        by_judge[name], about[name] = await _label(judge, config, replies, prompts, folder)
        about[name] |= judge_agreement(replies, by_judge[name])
    configured = [judge.model_name_or_path for judge in config.judges]
    _write_answers(folder / ANSWERS_NAME, replies, {name: by_judge[name] for name in configured})
    return {
        "replies": len(replies),
        "dialogues": len({reply.history for reply in replies}),
        "people": people_answers(replies),
        "judges": {name: about[name] for name in configured},
        "differences": kappa_differences(replies, {name: by_judge[name] for name in configured}),
    }


async def _label(
    judge: JudgeModelConfig, config: EvalConfig, replies: list[LabelledReply], prompts: list[str], folder: Path
) -> tuple[ReplyLabels, dict[str, Any]]:
    """A judge's labels, and the entries of metrics.json about where they come from."""
    if judge.model_name_or_path in EMBEDDED_JUDGES:
        reader = MessageLabels(config.generation, config.benchmark.path)
        labels = [{name: reader.reads(label, reply.exchange) for name, label in READ_AS.items()} for reply in replies]
        return labels, {"read_by": reader.about([*READ_AS.values()])}
    max_tokens = config.generation.max_tokens_per_judge_attempt
    answers = await ask_judge(judge, prompts, CHOICES, max_tokens, folder / "judges")
    return answers.by_prompt, answers.about()


def judge_prompt(path: str, reply: LabelledReply) -> str:
    """The prompt that asks a judge model about a reply."""
    return render(path, history=reply.history, solution=reply.solution, reply=reply.text)


def _write_answers(path: Path, replies: list[LabelledReply], by_judge: dict[str, ReplyLabels]) -> None:
    lines = [
        {
            "id": reply.id,
            "people": dict(reply.labels),
            "judges": {name: labels[index] for name, labels in by_judge.items()},
        }
        for index, reply in enumerate(replies)
    ]
    write_rows(path, lines)
