"""MathDial: the tutor writes the teacher's next turn, and its turns are compared with the human teacher's.

The same labeller reads both turns, so that its own mistakes weigh on both sides. How far it agrees with what the
teachers said of their own turns is measured beside it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from classroom_rl.config.base import JudgeModelConfig
from classroom_rl.config.benchmark import JUDGE, TUTOR, BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.values import EMBEDDED_JUDGES, RULES
from classroom_rl.evaluation.published.asking import ask_judge
from classroom_rl.evaluation.published.checked_rows import draw
from classroom_rl.evaluation.published.label_agreement import agreement_as_json
from classroom_rl.evaluation.published.mathdial import TELLING_MOVE, TeacherTurn, read_mathdial
from classroom_rl.evaluation.published.message_labels import MessageLabels
from classroom_rl.evaluation.published.tutor import open_tutor
from classroom_rl.judges.readings import REVEALS_ANSWER, TELLING
from classroom_rl.rollout.intervals import UNIT, mean_with_ci
from classroom_rl.rollout.prompts import render
from classroom_rl.system.storage import write_whole

LABELS = (TELLING, REVEALS_ANSWER)
NO, YES = "no", "yes"
CHOICES = dict.fromkeys(LABELS, (NO, YES))
TURNS_NAME = "turns.jsonl"

TurnLabels = Sequence[dict[str, bool] | None]
"""For each turn whether each of `LABELS` holds; None without a verdict."""


async def continue_dialogues(config: EvalConfig, benchmark: BenchmarkConfig, folder: Path) -> dict[str, Any]:
    """Have the tutor write each turn of the teacher, label it and the teacher's own, and compare them. Both turns and
    their labels go into `turns.jsonl`.

    Returns:
        The entries of metrics.json.

    Raises:
        DataError: if the benchmark cannot be read.
        ConfigError: if a model or key is missing, or the readers were trained on this benchmark.
        EngineFailure, ProviderFailure: if the tutor or a judge cannot be asked at all.
    """
    everything = read_mathdial(benchmark.path, benchmark.split)
    turns = draw(everything, lambda turn: turn.dialogue, benchmark.max_dialogues, config.seed)
    reader = MessageLabels(config.generation, benchmark.path)
    prompts = [tutor_prompt(benchmark.prompts_paths[TUTOR], turn) for turn in turns]
    async with open_tutor(config, folder) as tutor:
        replies = await tutor.answer(prompts, "continuing dialogues")
        about = tutor.about()
    found = {RULES: (_read(reader, turns, [turn.text for turn in turns]), _read(reader, turns, replies.texts))}
    labellers: dict[str, dict[str, Any]] = {RULES: {"read_by": reader.about(LABELS)}}
    for judge in config.judges:
        if judge.model_name_or_path not in EMBEDDED_JUDGES:
            labels, asked = await _ask(config, benchmark, judge, turns, replies.texts, folder)
            found[judge.model_name_or_path], labellers[judge.model_name_or_path] = labels, asked
    for name, (of_teacher, of_tutor) in found.items():
        labellers[name] |= compare_turns(turns, of_teacher, of_tutor)
    _write_turns(folder / TURNS_NAME, turns, replies.texts, found)
    return about | {
        "turns": len(turns),
        "dialogues": len({turn.dialogue for turn in turns}),
        "answered": len(turns) - sum(replies.failures.values()),
        "failures": dict(replies.failures),
        "cut": replies.cut,
        "words": {"tutor": _words(replies.texts), "teacher": _words([turn.text for turn in turns])},
        "telling_by_the_teachers_own_label": mean_with_ci(
            _by_dialogue(turns, [turn.move == TELLING_MOVE for turn in turns])
        ),
        "labellers": labellers,
    }


def tutor_prompt(path: str, turn: TeacherTurn) -> str:
    """What the tutor is asked. Like the human teachers it sees the solution and the student's attempt."""
    return render(
        path,
        problem=turn.problem,
        solution=turn.solution,
        student_solution=turn.student_solution,
        conversation=list(turn.before),
    )


def compare_turns(turns: Sequence[TeacherTurn], of_teacher: TurnLabels, of_tutor: TurnLabels) -> dict[str, Any]:
    """The shares of both sides by one labeller, over the turns in which it labelled both.

    Returns:
        For each of `LABELS` the estimates of `tutor`, `teacher` and their paired `difference`, by dialogue; and
        `agreement_on_telling` of the labeller with the teachers' own labels of their turns.
    """
    both = [place for place in range(len(turns)) if of_teacher[place] is not None and of_tutor[place] is not None]
    shares = {}
    for label in LABELS:
        sides = {
            side: {place: float(labels[place][label]) for place in both}
            for side, labels in (("tutor", of_tutor), ("teacher", of_teacher))
        }
        sides["difference"] = {place: sides["tutor"][place] - sides["teacher"][place] for place in both}
        shares[label] = {
            side: mean_with_ci(
                _by_dialogue([turns[place] for place in both], [values[place] for place in both]),
                (-1.0, 1.0) if side == "difference" else UNIT,
            )
            for side, values in sides.items()
        }
    read = [(turn, labels) for turn, labels in zip(turns, of_teacher, strict=True) if labels is not None]
    own, labelled = [turn.move == TELLING_MOVE for turn, _ in read], [labels[TELLING] for _, labels in read]
    dialogues = [turn.dialogue for turn, _ in read]
    trust = agreement_as_json(own, labelled, dialogues)
    return {"turns_compared": len(both), "shares": shares, "agreement_on_telling": trust}


def _read(reader: MessageLabels, turns: Sequence[TeacherTurn], texts: Sequence[str | None]) -> TurnLabels:
    return [
        None if text is None else {label: reader.reads(label, turn.exchange_with(text)) for label in LABELS}
        for turn, text in zip(turns, texts, strict=True)
    ]


async def _ask(
    config: EvalConfig,
    benchmark: BenchmarkConfig,
    judge: JudgeModelConfig,
    turns: Sequence[TeacherTurn],
    texts: Sequence[str | None],
    folder: Path,
) -> tuple[tuple[TurnLabels, TurnLabels], dict[str, Any]]:
    """A judge's labels of the teachers' turns and of the tutor's, and what is known of its calls."""
    path, most = benchmark.prompts_paths[JUDGE], config.generation.max_tokens_per_judge_attempt
    written = [place for place, text in enumerate(texts) if text is not None]
    prompts = [judge_prompt(path, turn, turn.text) for turn in turns]
    prompts += [judge_prompt(path, turns[place], texts[place]) for place in written]
    answers = await ask_judge(judge, prompts, CHOICES, most, folder / "judges")
    labels = [None if found is None else {label: found[label] == YES for label in LABELS} for found in answers.found]
    of_tutor: list[dict[str, bool] | None] = [None] * len(turns)
    for place, found in zip(written, labels[len(turns) :], strict=True):
        of_tutor[place] = found
    return (labels[: len(turns)], of_tutor), answers.about()


def judge_prompt(path: str, turn: TeacherTurn, reply: str) -> str:
    """What a judge model is asked about a turn."""
    return render(path, problem=turn.problem, solution=turn.solution, conversation=list(turn.before), reply=reply)


def _by_dialogue(turns: Sequence[TeacherTurn], values: Sequence[float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for turn, value in zip(turns, values, strict=True):
        found.setdefault(turn.dialogue, []).append(float(value))
    return found


def _words(texts: Sequence[str | None]) -> float | None:
    counts = [len(text.split()) for text in texts if text is not None]
    return fmean(counts) if counts else None


def _write_turns(
    path: Path,
    turns: Sequence[TeacherTurn],
    texts: Sequence[str | None],
    found: dict[str, tuple[TurnLabels, TurnLabels]],
) -> None:
    lines = [
        {
            "dialogue": turn.dialogue,
            "turn": turn.number,
            "move": turn.move,
            "teacher": turn.text,
            "tutor": texts[place],
            "labels": {name: {"teacher": own[place], "tutor": its[place]} for name, (own, its) in found.items()},
        }
        for place, turn in enumerate(turns)
    ]
    write_whole(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
