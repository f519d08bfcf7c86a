"""The BEA 2025 shared task on MRBench V3: judges, rules, move classifiers and a trained classifier label tutors'
replies in four tracks, are scored as the task scores, and write its submissions.

Kochmar et al., "Findings of the BEA 2025 Shared Task on Pedagogical Ability Assessment of AI-powered Tutors", BEA 2025
(https://sig-edu.org/sharedtask/2025). Per track, accuracy and macro F1 over three answers ("exact"), and with "Yes" and
"To some extent" as one answer ("lenient"). Track 5, the tutor's identity, is not done here.

A submission is one `predictions.json` per track: the task's file with that track's label as each reply's `annotation`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from classroom_rl.config.benchmark import BEA2025, JUDGE, BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.values import EMBEDDED_JUDGES
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.published.checked_rows import draw, write_rows
from classroom_rl.evaluation.published.labellers import MessageLabels, ask_judge
from classroom_rl.evaluation.published.mrbench import (
    ANSWERS_NAME,
    CHOICES,
    DIMENSIONS,
    TRACKS,
    LabelledReply,
    judge_prompt,
    read_mrbench,
    reply_id,
)
from classroom_rl.evaluation.report.tables import NO_VALUE, align
from classroom_rl.judges.agreement import confusion_by_group, interval_of, macro_f1, resampled
from classroom_rl.judges.moves.classifier import TEXTS, Counted, fit_linear, require_sklearn
from classroom_rl.judges.moves.cross_validation import INNER_FOLDS, folds_by_lesson
from classroom_rl.judges.moves.labelled import MRBENCH, numbered_rows, turns_of_mrbench
from classroom_rl.judges.readings import ACTIONABLE, GUIDANCE, MISTAKE_IDENTIFIED, Exchange
from classroom_rl.rollout.intervals import by_lesson, mean_with_ci
from classroom_rl.system.storage import write_whole

PUBLISHED_BEST = {"mistake_identification": 0.7181, "providing_guidance": 0.5834}
"""The best exact macro F1 on the blind test set, by the abstract of Kochmar et al. (2025); the other two tracks' best
are between these. They are of other replies than any labelled file has."""

TRACK_NAMES = {track: track.title() for track in TRACKS}
"""Track → its key in the data."""

ANSWERS = DIMENSIONS[TRACKS[0]].answers
ANSWER_NAMES = {answer: answer.capitalize() for answer in ANSWERS}
"""Answer → its spelling in the data."""

READ_AS = {"mistake_identification": MISTAKE_IDENTIFIED, "providing_guidance": GUIDANCE, "actionability": ACTIONABLE}
"""Track → the label of rules and move classifiers whose yes and no are taken for its "Yes" and "No"."""

COMMONEST, CLASSIFIER = "commonest", "classifier"
SUBMISSIONS, PREDICTIONS_NAME = "submissions", "predictions.json"
FOLDS, SHORTEST_PROBLEM = 5, 100
_STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SEED = 0

Labels = Sequence[Mapping[str, str] | None]
"""For each reply a system's answer by track; None without a verdict."""


def problem_of(reply: LabelledReply) -> str:
    """What replies share that must not be split between training and test: the text of the problem, with which most
    dialogues open, or the whole dialogue if its first turn has fewer than `SHORTEST_PROBLEM` characters. The task's ids
    do not do: one dialogue occurs under several."""
    first_turn = next((text for _, text in turns_of_mrbench(reply.history)), "")
    return " ".join((first_turn if len(first_turn) >= SHORTEST_PROBLEM else reply.history).split())


# Scores ------------------------------------------------------------------------------------------------------------


def score(replies: Sequence[LabelledReply], labels: Labels) -> dict[str, dict[str, Any]]:
    """A system's scores in each track that it answers: {"exact", "lenient"} → {"macro_f1", "ci95", "accuracy"}, and
    `replies`. Replies without a verdict are left out; intervals are over dialogues."""
    judged = [(reply, answers) for reply, answers in zip(replies, labels, strict=True) if answers is not None]
    scores = {}
    for track in TRACKS:
        pairs = [(reply, answers[track]) for reply, answers in judged if track in answers]
        if pairs:
            of_people, of_system = [reply.labels[track] for reply, _ in pairs], [answer for _, answer in pairs]
            groups = [reply.history for reply, _ in pairs]
            scores[track] = {"replies": len(pairs), "exact": _scores(of_people, of_system, groups, ANSWERS)} | {
                "lenient": _scores(_lenient(of_people), _lenient(of_system), groups, ANSWERS[:2])
            }
    return scores


def _lenient(answers: Sequence[str]) -> list[str]:
    """The answers with "yes" as "to some extent"."""
    return [ANSWERS[min(ANSWERS.index(answer), 1)] for answer in answers]


def _scores(people: Sequence[str], system: Sequence[str], groups: Sequence[str], answers: Sequence[str]) -> dict:
    numbers = [list(map(answers.index, side)) for side in (people, system)]
    tables = confusion_by_group(*numbers, groups, len(answers))
    correct = by_lesson(groups, [label == answer for label, answer in zip(people, system, strict=True)])
    values = macro_f1(resampled(tables))
    return {"macro_f1": float(values[0]), "ci95": interval_of(values), "accuracy": mean_with_ci(correct)}


# The classifier ------------------------------------------------------------------------------------------------------


def classify(train: Sequence[LabelledReply], replies: Sequence[LabelledReply]) -> tuple[Labels, dict[str, Any]]:
    """Predict all tracks with the regression and the features of the move classifiers, one per answer.

    Replies on a problem that `train` has, too, are predicted in `FOLDS` folds, each without the training replies on its
    problems. Rare answers are given more often by subtracting a part of the logit of each answer's frequency; the part
    is chosen for macro F1 in inner folds of the training replies. Solutions are not used: V3 has none.

    Returns:
        The labels, and {"train", "shared_problems", "folds"} for metrics.json.
    """
    require_sklearn()
    all_replies = [*train, *replies]
    counted = Counted(
        [Exchange(reply.exchange.message, reply.exchange.student, "", reply.exchange.before) for reply in all_replies],
        TEXTS,
    )
    targets = {track: np.array([ANSWERS.index(reply.labels[track]) for reply in train]) for track in TRACKS}
    problems, test_problems = [problem_of(reply) for reply in train], [problem_of(reply) for reply in replies]
    shared = set(problems) & set(test_problems)
    for side, names in (("training", problems), ("test", test_problems)):
        minimum = INNER_FOLDS + 1 if side == "training" else FOLDS if shared else 1
        if len(set(names)) < minimum:
            raise DataError(f"The {side} file has {len(set(names))} problems; the classifier needs at least {minimum}.")
    predicted: list[dict[str, str]] = [{} for _ in replies]
    folds = [test for _, test in folds_by_lesson(test_problems, FOLDS, _SEED)] if shared else [np.arange(len(replies))]
    for test in folds:
        held_out = {test_problems[index] for index in test}
        fitted = np.array([index for index, problem in enumerate(problems) if problem not in held_out])
        if len({problems[index] for index in fitted}) < INNER_FOLDS:
            raise DataError("Too few training replies are left on other problems than those that are predicted.")
        for track, answers in _predict(counted, targets, problems, fitted, len(train) + test).items():
            for index, answer in zip(test, answers, strict=True):
                predicted[index][track] = ANSWERS[answer]
    return predicted, {"train": len(train), "shared_problems": len(shared), "folds": len(folds)}


def _predict(
    counted: Counted, targets: Mapping[str, np.ndarray], problems: Sequence[str], train: np.ndarray, test: np.ndarray
) -> dict[str, np.ndarray]:
    """For each track the predicted answers, as indices, of the replies at `test`."""
    inner = {track: np.zeros((len(train), len(ANSWERS))) for track in targets}
    for fitted, held_out in folds_by_lesson([problems[index] for index in train], INNER_FOLDS, _SEED + 1):
        for track, scores in _answer_scores(counted, targets, train[fitted], train[held_out]).items():
            inner[track][held_out] = scores
    predictions = {}
    for track, scores in _answer_scores(counted, targets, train, test).items():
        labels = targets[track][train]

        def quality(strength: float, labels: np.ndarray = labels, scores: np.ndarray = inner[track]) -> float:
            table = np.zeros((len(ANSWERS), len(ANSWERS)))
            np.add.at(table, (labels, _choose(scores, labels, strength)), 1)
            return float(macro_f1(table))

        predictions[track] = _choose(scores, labels, max(_STRENGTHS, key=quality))
    return predictions


def _answer_scores(
    counted: Counted, targets: Mapping[str, np.ndarray], train: np.ndarray, test: np.ndarray
) -> dict[str, np.ndarray]:
    """For each track the logit of each answer, of shape (test, answers); infinite where training has one answer."""
    train_tables, test_tables = counted.tables(train, test)
    scores = {}
    for track, labels in targets.items():
        scores[track] = np.full((len(test), len(ANSWERS)), -np.inf)
        for answer in np.unique(labels[train]):
            target = labels[train] == answer
            scores[track][:, answer] = np.inf if target.all() else fit_linear(train_tables, target).scores(test_tables)
    return scores


def _choose(scores: np.ndarray, labels: np.ndarray, strength: float) -> np.ndarray:
    """The best answer of each row, after `strength` times the logit of each answer's share of `labels` is taken off."""
    shares = np.bincount(labels, minlength=len(ANSWERS)).clip(0.5, len(labels) - 0.5) / len(labels)
    return np.argmax(scores - strength * np.log(shares / (1 - shares)), axis=1)


# Runs ----------------------------------------------------------------------------------------------------------------


async def score_systems(config: EvalConfig, benchmark: BenchmarkConfig, folder: Path) -> dict[str, Any]:
    """Have each of `judges`, and with `benchmark.train_path` a classifier, label every reply once; score them if people
    labelled the replies, too. Writes `answers.jsonl`, and a submission per system and track that it answers for every
    reply of the file.

    Returns:
        The entries of metrics.json: `systems`, each with its `scores` ({} on the blind test set), `submissions`, and
        where its answers come from.

    Raises:
        DataError: if a file has some replies with labels and some without, or an id twice.
        ConfigError: if the move classifiers were trained on MRBench, whose dialogues V3 has.
    """
    all_replies = read_mrbench(benchmark.path, benchmark.split)
    if len({reply.id for reply in all_replies}) < len(all_replies):
        raise DataError(f"{benchmark.path} has two conversations of one conversation_id: no submission can tell them.")
    labelled = sum(bool(reply.labels) for reply in all_replies)
    if labelled not in (0, len(all_replies)):
        raise DataError(
            f"{benchmark.path}: {labelled} of {len(all_replies)} replies have labels; it must be all or none."
        )
    replies = draw(all_replies, lambda reply: reply.history, benchmark.max_dialogues, config.seed)
    by_system, about = {}, {}
    if benchmark.train_path:
        train = read_mrbench(benchmark.train_path, benchmark.split)
        if not all(reply.labels for reply in train):
            raise DataError(f"benchmark.train_path: {benchmark.train_path} has replies without labels.")
        by_system[CLASSIFIER], about[CLASSIFIER] = classify(train, replies)
    # Judges without a model come first: an error in the move classifiers shows before anything is paid.
    for judge in sorted(config.judges, key=lambda judge: judge.model_name_or_path not in EMBEDDED_JUDGES):
        name = judge.model_name_or_path
        by_system[name], about[name] = await _ask(judge, config, replies, bool(labelled), folder)
    complete = len(replies) == len(all_replies)
    for name, labels in by_system.items():
        about[name]["scores"] = score(replies, labels) if labelled else {}
        about[name]["submissions"] = write_submissions(folder, name, benchmark, labels, replies) if complete else []
    write_rows(
        folder / ANSWERS_NAME,
        [
            {"id": reply.id, "people": {track: reply.labels[track] for track in TRACKS if track in reply.labels}}
            | {"systems": {name: labels[index] for name, labels in by_system.items()}}
            for index, reply in enumerate(replies)
        ],
    )
    if labelled:
        about = {COMMONEST: {"scores": score(replies, _commonest(replies)), "submissions": []}} | about
    dialogues = len({reply.history for reply in replies})
    return {"replies": len(replies), "dialogues": dialogues, "published_best": PUBLISHED_BEST, "systems": about}


def _commonest(replies: Sequence[LabelledReply]) -> Labels:
    """People's commonest answer in each track, for every reply."""
    labels_by_track = {track: [reply.labels[track] for reply in replies] for track in TRACKS}
    return [{track: max(ANSWERS, key=labels.count) for track, labels in labels_by_track.items()}] * len(replies)


async def _ask(
    judge: JudgeModelConfig, config: EvalConfig, replies: Sequence[LabelledReply], labelled: bool, folder: Path
) -> tuple[Labels, dict[str, Any]]:
    """A judge's labels, and the entries of metrics.json about where they come from."""
    if judge.model_name_or_path not in EMBEDDED_JUDGES:
        prompts = [judge_prompt(config.benchmark.prompts_paths[JUDGE], reply) for reply in replies]
        max_tokens = config.generation.max_tokens_per_judge_attempt
        answers = await ask_judge(judge, prompts, CHOICES, max_tokens, folder / "judges")
        return answers.by_prompt, answers.about()
    reader = MessageLabels(config.generation, config.benchmark.path)
    read_by = {track: reader.source_of(label) for track, label in READ_AS.items()}
    if labelled and MRBENCH in read_by.values():
        raise ConfigError(
            f"The readers in generation.readers_path ({config.generation.readers_path}) were trained on {MRBENCH}, "
            f"whose dialogues V3 has, too: their scores would mean nothing. Set benchmark.train_path to that file "
            f"instead ({BEA2025} then leaves out what both share), or train readers on other data."
        )
    labels = [
        {
            track: ANSWERS[-1] if reader.reads(label, reply.exchange) else ANSWERS[0]
            for track, label in READ_AS.items()
            if read_by[track] is not None
        }
        for reply in replies
    ]
    return labels, {"read_by": read_by}


def write_submissions(
    folder: Path, system: str, benchmark: BenchmarkConfig, labels: Labels, replies: Sequence[LabelledReply]
) -> list[str]:
    """Write `submissions/<system>/<track>/predictions.json` for each track that the system answers for every reply:
    the rows of the benchmark's file, each reply with that track's label alone. The task takes each as a zip file.

    Returns:
        The paths of the files in `folder`; none for a file that is no V3, which the task does not take.
    """
    rows = [row for _, row in numbered_rows(benchmark.path, benchmark.split)]
    if not all("tutor_responses" in row for row in rows):
        return []
    by_id = {reply.id: answers or {} for reply, answers in zip(replies, labels, strict=True)}
    paths = []
    for track, name in TRACK_NAMES.items():
        if not all(track in answers for answers in by_id.values()):
            continue
        predictions = [row | {"tutor_responses": _annotated(row, track, by_id)} for row in rows]
        path = Path(SUBMISSIONS, system.replace("/", "--"), name, PREDICTIONS_NAME)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / path, json.dumps(predictions, ensure_ascii=False, indent=2) + "\n")
        paths.append(str(path))
    return paths


def _annotated(row: Mapping[str, Any], track: str, by_id: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The replies of a row, with a system's label."""
    return {
        tutor: {
            "response": reply["response"],
            "annotation": {TRACK_NAMES[track]: ANSWER_NAMES[by_id[reply_id(row["conversation_id"], tutor)][track]]},
        }
        for tutor, reply in row["tutor_responses"].items()
        if reply is not None
    }


def systems_table(metrics: Mapping[str, Any]) -> str:
    """The scores of every system in each track, beside the best published, and the submissions."""
    rows = [["track", "system", "macro F1", "accuracy", "lenient macro F1", "lenient accuracy", "replies"]]
    for track in TRACKS:
        for name, system in metrics["systems"].items():
            scores = system["scores"].get(track)
            if scores is not None:
                cells = [cell for kind in ("exact", "lenient") for cell in _cells(scores[kind])]
                rows.append([track, name, *cells, str(scores["replies"])])
        if track in PUBLISHED_BEST:
            rows.append([track, "best published", f"{PUBLISHED_BEST[track]:.3f}", *[NO_VALUE] * 4])
    opening = f"\n{metrics['replies']} replies in {metrics['dialogues']} dialogues; 95 % intervals over dialogues"
    source = (
        "best published: Kochmar et al. 2025, on the blind test set, so on other replies than any labelled file has"
    )
    files = [path for system in metrics["systems"].values() for path in system["submissions"]]
    missing = [
        f"{name}: no verdict on {system['asked'] - system['answered']} of {system['asked']} replies"
        for name, system in metrics["systems"].items()
        if system.get("answered") != system.get("asked")
    ]
    submissions = "\n".join(["submissions, each to be zipped:", *files]) if files else "no submission was written"
    return "\n\n".join([opening, align(rows), source, *missing, submissions])


def _cells(scores: Mapping[str, Any]) -> list[str]:
    interval = "" if scores["ci95"] is None else " [{:.3f}, {:.3f}]".format(*scores["ci95"])
    return [f"{scores['macro_f1']:.3f}{interval}", f"{scores['accuracy']['mean']:.3f}"]
