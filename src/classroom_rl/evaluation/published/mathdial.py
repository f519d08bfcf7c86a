"""MathDial: reads its dialogues, has the tutor write the teacher's next turn, and compares its turns with the
teacher's.

Macina et al., "MathDial", Findings of EMNLP 2023. Read in the published form, where the turns are one text, and in a
flat one with a list of turns (docs/evaluation.md).

The same labeller reads both turns, so that its own mistakes weigh on both sides. How far it agrees with what the
teachers said of their own turns is measured beside it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from classroom_rl.config.base import JudgeModelConfig
from classroom_rl.config.benchmark import JUDGE, TUTOR, BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.values import EMBEDDED_JUDGES, RULES
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.asking import ask_judge
from classroom_rl.evaluation.published.checked_rows import PublishedRow, draw, read_rows
from classroom_rl.evaluation.published.label_agreement import agreement_as_json
from classroom_rl.evaluation.published.reply_labels import MessageLabels
from classroom_rl.evaluation.published.tutor import open_tutor
from classroom_rl.judges.moves.labelled import MathDialTurn, exchanges_of_mathdial, turns_of_mathdial
from classroom_rl.judges.readings import REVEALS_ANSWER, TELLING, Exchange
from classroom_rl.rollout.intervals import UNIT, mean_with_ci
from classroom_rl.rollout.prompts import render
from classroom_rl.system.storage import write_whole

MOVES = ("focus", "probing", "telling", "generic")
TELLING_MOVE = "telling"


class _Turn(PublishedRow):
    role: str
    text: str
    move: str | None


class _Dialogue(PublishedRow):
    question: str
    ground_truth: str
    student_incorrect_solution: str


class _Flat(_Dialogue):
    turns: list[_Turn]

    def said(self) -> list[MathDialTurn]:
        return [(turn.role == "teacher", turn.move, turn.text) for turn in self.turns]


class _Published(_Dialogue):
    conversation: str

    def said(self) -> list[MathDialTurn]:
        return turns_of_mathdial(self.conversation)


@dataclass(frozen=True)
class TeacherTurn:
    """A turn of the teacher that answers the student.

    Attributes:
        dialogue: names the dialogue.
        number: its place among the turns of the dialogue, from 0.
        student_solution: the student's attempt at the problem, before the dialogue.
        before: the turns before it, as {"role": "teacher" or "student", "content"}.
        text: what the teacher said.
        move: one of `MOVES`.
        exchange: what a reader of single messages is shown of the teacher's turn.
    """

    dialogue: str
    number: int
    problem: str
    solution: str
    student_solution: str
    before: tuple[dict[str, str], ...]
    text: str
    move: str
    exchange: Exchange

    def exchange_with(self, text: str) -> Exchange:
        """What a reader is shown if someone else says `text` in the teacher's place."""
        return replace(self.exchange, message=text)


def read_mathdial(name: str, split: str) -> list[TeacherTurn]:
    """The labelled turns of teachers that answer a turn of the student.

    Raises:
        DataError: naming file, row and field, if it cannot be read or holds no such turn.
    """
    found = [turn for where, row in read_rows(name, split, _Flat, _Published) for turn in _turns(where, row)]
    if not found:
        raise DataError(f"{name} holds no labelled turn of a teacher that answers a student.")
    return found


def _turns(where: str, row: _Flat | _Published) -> Iterator[TeacherTurn]:
    said = row.said()
    exchanges = exchanges_of_mathdial(row.question, row.ground_truth, row.student_incorrect_solution, said)
    before: tuple[dict[str, str], ...] = ()
    for number, ((teaches, move, text), exchange) in enumerate(zip(said, exchanges, strict=True)):
        if teaches and move not in (None, *MOVES):
            raise DataError(f"{where}: turn {number} has the move {move!r}; there are {', '.join(MOVES)}.")
        if exchange is not None and move is not None and before and before[-1]["role"] == "student":
            about = (row.question, row.ground_truth, row.student_incorrect_solution)
            yield TeacherTurn(where, number, *about, before, text.strip(), move, exchange)
        before = (*before, {"role": "teacher" if teaches else "student", "content": text.strip()})


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
