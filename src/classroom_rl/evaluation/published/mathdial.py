"""MathDial: the tutor writes the teacher's next turn in its dialogues, and its turns are compared with the teacher's.

Macina et al., "MathDial", Findings of EMNLP 2023. Two file formats are read: the published one, where the turns are one
text, and a flat one with a list of turns (docs/evaluation.md).

The same labeller labels both turns, so that its mistakes affect both sides alike. Its agreement with the teachers'
labels of their own turns is reported, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from classroom_rl.config.benchmark import JUDGE, TUTOR, BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.values import EMBEDDED_JUDGES, RULES
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.checked_rows import PublishedRow, draw, read_rows, write_rows
from classroom_rl.evaluation.published.labellers import MessageLabels, agreement_as_json, ask_judge
from classroom_rl.evaluation.published.tutor import open_tutor
from classroom_rl.judges.moves.labelled import MathDialTurn, exchanges_of_mathdial, turns_of_mathdial
from classroom_rl.judges.readings import REVEALS_ANSWER, TELLING, Exchange
from classroom_rl.rollout.intervals import UNIT, by_lesson, mean_with_ci
from classroom_rl.rollout.prompts import render

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

    def utterances(self) -> list[MathDialTurn]:
        return [(turn.role == "teacher", turn.move, turn.text) for turn in self.turns]


class _Published(_Dialogue):
    conversation: str

    def utterances(self) -> list[MathDialTurn]:
        return turns_of_mathdial(self.conversation)


@dataclass(frozen=True)
class TeacherTurn:
    """A turn of the teacher that answers the student.

    Attributes:
        number: its index among the turns of the dialogue, from 0.
        student_solution: the student's attempt at the problem, before the dialogue.
        before: the turns before it, as {"role": "teacher" or "student", "content"}.
        move: one of `MOVES`.
        exchange: the teacher's turn with its context, as input of a move classifier.
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
        """The input of a move classifier if `text` replaces the teacher's turn."""
        return replace(self.exchange, message=text)


def read_mathdial(name: str, split: str) -> list[TeacherTurn]:
    """Read the labelled teacher turns that answer a student's turn. Raises `DataError`, naming file, row and field, if
    it cannot be read or holds no such turn."""
    turns = [turn for where, row in read_rows(name, split, _Flat, _Published) for turn in _turns(where, row)]
    if not turns:
        raise DataError(f"{name} holds no labelled turn of a teacher that answers a student.")
    return turns


def _turns(where: str, row: _Flat | _Published) -> Iterator[TeacherTurn]:
    utterances = row.utterances()
    exchanges = exchanges_of_mathdial(row.question, row.ground_truth, row.student_incorrect_solution, utterances)
    before: tuple[dict[str, str], ...] = ()
    for number, ((teaches, move, text), exchange) in enumerate(zip(utterances, exchanges, strict=True)):
        if teaches and move not in (None, *MOVES):
            raise DataError(f"{where}: turn {number} has the move {move!r}; there are {', '.join(MOVES)}.")
        if exchange is not None and move is not None and before and before[-1]["role"] == "student":
            problem_texts = (row.question, row.ground_truth, row.student_incorrect_solution)
            yield TeacherTurn(where, number, *problem_texts, before, text.strip(), move, exchange)
        before = (*before, {"role": "teacher" if teaches else "student", "content": text.strip()})


LABELS = (TELLING, REVEALS_ANSWER)
NO, YES = "no", "yes"
CHOICES = dict.fromkeys(LABELS, (NO, YES))
TURNS_NAME = "turns.jsonl"

TurnLabels = Sequence[dict[str, bool] | None]
"""For each turn, label → whether it holds, for all of `LABELS`; None without a verdict."""


async def continue_dialogues(config: EvalConfig, benchmark: BenchmarkConfig, folder: Path) -> dict[str, Any]:
    """Have the tutor write a reply for each teacher turn, label both, and compare them. Both turns and their labels are
    written to `turns.jsonl`."""
    all_turns = read_mathdial(benchmark.path, benchmark.split)
    turns = draw(all_turns, lambda turn: turn.dialogue, benchmark.max_dialogues, config.seed)
    reader = MessageLabels(config.generation, benchmark.path)
    prompts = [tutor_prompt(benchmark.prompts_paths[TUTOR], turn) for turn in turns]
    async with open_tutor(config, folder) as tutor:
        replies = await tutor.answer(prompts, "continuing dialogues")
        about = tutor.about()
    by_labeller = {RULES: (_read(reader, turns, [turn.text for turn in turns]), _read(reader, turns, replies.texts))}
    labellers: dict[str, dict[str, Any]] = {RULES: {"read_by": reader.about(LABELS)}}
    for judge in config.judges:
        if judge.model_name_or_path not in EMBEDDED_JUDGES:
            labels, about_calls = await _ask(config, benchmark, judge, turns, replies.texts, folder)
            by_labeller[judge.model_name_or_path], labellers[judge.model_name_or_path] = labels, about_calls
    for name, (of_teacher, of_tutor) in by_labeller.items():
        labellers[name] |= compare_turns(turns, of_teacher, of_tutor)
    _write_turns(folder / TURNS_NAME, turns, replies.texts, by_labeller)
    return about | {
        "turns": len(turns),
        "dialogues": len({turn.dialogue for turn in turns}),
        "answered": len(turns) - sum(replies.failures.values()),
        "failures": dict(replies.failures),
        "cut": replies.cut,
        "words": {"tutor": _words(replies.texts), "teacher": _words([turn.text for turn in turns])},
        "telling_by_the_teachers_own_label": mean_with_ci(
            by_lesson([turn.dialogue for turn in turns], [turn.move == TELLING_MOVE for turn in turns])
        ),
        "labellers": labellers,
    }


def tutor_prompt(path: str, turn: TeacherTurn) -> str:
    """The prompt for the tutor. Like the human teachers, it sees the solution and the student's attempt."""
    return render(
        path,
        problem=turn.problem,
        solution=turn.solution,
        student_solution=turn.student_solution,
        conversation=list(turn.before),
    )


def compare_turns(turns: Sequence[TeacherTurn], of_teacher: TurnLabels, of_tutor: TurnLabels) -> dict[str, Any]:
    """Compare the tutor's turns with the teachers' by one labeller's labels, on the turns where it labelled both.

    Returns:
        For each of `LABELS` the estimates of `tutor`, `teacher` and their paired `difference`, by dialogue; and
        `agreement_on_telling` of the labeller with the teachers' own labels of their turns.
    """
    shared = [index for index in range(len(turns)) if of_teacher[index] is not None and of_tutor[index] is not None]
    shares = {}
    for label in LABELS:
        sides = {
            side: {index: float(labels[index][label]) for index in shared}
            for side, labels in (("tutor", of_tutor), ("teacher", of_teacher))
        }
        sides["difference"] = {index: sides["tutor"][index] - sides["teacher"][index] for index in shared}
        shares[label] = {
            side: mean_with_ci(
                by_lesson([turns[index].dialogue for index in shared], values.values()),
                (-1.0, 1.0) if side == "difference" else UNIT,
            )
            for side, values in sides.items()
        }
    labelled_turns = [(turn, labels) for turn, labels in zip(turns, of_teacher, strict=True) if labels is not None]
    own_labels = [turn.move == TELLING_MOVE for turn, _ in labelled_turns]
    telling_labels = [labels[TELLING] for _, labels in labelled_turns]
    dialogues = [turn.dialogue for turn, _ in labelled_turns]
    agreement = agreement_as_json(own_labels, telling_labels, dialogues)
    return {"turns_compared": len(shared), "shares": shares, "agreement_on_telling": agreement}


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
    """A judge's labels of the teachers' turns and of the tutor's, and the entries of metrics.json about its calls."""
    path, max_tokens = benchmark.prompts_paths[JUDGE], config.generation.max_tokens_per_judge_attempt
    replied = [index for index, text in enumerate(texts) if text is not None]
    prompts = [judge_prompt(path, turn, turn.text) for turn in turns]
    prompts += [judge_prompt(path, turns[index], texts[index]) for index in replied]
    answers = await ask_judge(judge, prompts, CHOICES, max_tokens, folder / "judges")
    labels = [
        None if answer is None else {label: answer[label] == YES for label in LABELS} for answer in answers.by_prompt
    ]
    of_tutor: list[dict[str, bool] | None] = [None] * len(turns)
    for index, tutor_labels in zip(replied, labels[len(turns) :], strict=True):
        of_tutor[index] = tutor_labels
    return (labels[: len(turns)], of_tutor), answers.about()


def judge_prompt(path: str, turn: TeacherTurn, reply: str) -> str:
    """The prompt that asks a judge model about a turn."""
    return render(path, problem=turn.problem, solution=turn.solution, conversation=list(turn.before), reply=reply)


def _words(texts: Sequence[str | None]) -> float | None:
    counts = [len(text.split()) for text in texts if text is not None]
    return fmean(counts) if counts else None


def _write_turns(
    path: Path,
    turns: Sequence[TeacherTurn],
    texts: Sequence[str | None],
    by_labeller: dict[str, tuple[TurnLabels, TurnLabels]],
) -> None:
    lines = [
        {
            "dialogue": turn.dialogue,
            "turn": turn.number,
            "move": turn.move,
            "teacher": turn.text,
            "tutor": texts[index],
            "labels": {
                name: {"teacher": of_teacher[index], "tutor": of_tutor[index]}
                for name, (of_teacher, of_tutor) in by_labeller.items()
            },
        }
        for index, turn in enumerate(turns)
    ]
    write_rows(path, lines)
