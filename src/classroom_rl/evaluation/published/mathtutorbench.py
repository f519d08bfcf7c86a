"""MathTutorBench: asks a tutor the questions of each task and scores its answers. Turns that it writes as a teacher are
scored by a reward model; an answer that cannot be parsed counts as wrong.

Macina et al., "MathTutorBench", EMNLP 2025. The files are those in the folder `dataset` of its repository, and GSM8K's
test set. The prompts are our own, so results are not comparable with those of the benchmark's leaderboard.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from classroom_rl.config.benchmark import (
    MISTAKE_CORRECTION,
    MISTAKE_LOCATION,
    PEDAGOGY,
    PEDAGOGY_HARD,
    PROBLEM_SOLVING,
    SCAFFOLDING,
    SCAFFOLDING_HARD,
    SOLUTION_CORRECTNESS,
    BenchmarkConfig,
)
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import DataError
from classroom_rl.evaluation.metrics.maths import check_scorer, score_dialogues
from classroom_rl.evaluation.published.checked_rows import PublishedRow, draw, read_rows, write_rows
from classroom_rl.evaluation.published.tutor import Replies, open_tutor
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.grading.forms import extract_boxed
from classroom_rl.judges.moves.rules import last_number
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.prompts import render
from classroom_rl.system.storage import write_whole

_STEP_VERIFY, _BRIDGE, _BRIDGE_HARD = "stepverify.json", "mathdial_bridge.json", "mathdial_bridge_hard.json"
FILES = {
    PROBLEM_SOLVING: "gsm8k_test.jsonl",
    SOLUTION_CORRECTNESS: _STEP_VERIFY,
    MISTAKE_LOCATION: _STEP_VERIFY,
    MISTAKE_CORRECTION: _STEP_VERIFY,
    SCAFFOLDING: _BRIDGE,
    PEDAGOGY: _BRIDGE,
    SCAFFOLDING_HARD: _BRIDGE_HARD,
    PEDAGOGY_HARD: _BRIDGE_HARD,
}
"""Task → its file in the folder."""

TEACHING = (SCAFFOLDING, PEDAGOGY, SCAFFOLDING_HARD, PEDAGOGY_HARD)
"""The tasks in which the tutor writes a teacher's turn."""


class _Utterance(PublishedRow):
    user: str
    text: str


class _Gsm8kRow(PublishedRow):
    """A row of GSM8K: the solution ends with "#### 72"."""

    question: str
    answer: str


class _StepVerifyRow(PublishedRow):
    """A problem with a student's wrong solution, and the index of its first wrong step, from 0."""

    problem: str
    reference_solution: str
    student_incorrect_solution: list[str]
    incorrect_index: int
    student_correct_response: str
    dialog_history: list[_Utterance]


class _BridgeRow(PublishedRow):
    """A dialogue whose last turn is the teacher's."""

    problem: str
    reference_solution: str
    dialog_history: list[_Utterance]


@dataclass(frozen=True)
class TutorTask:
    """One question to a tutor.

    Attributes:
        problem_id: names the problem or dialogue; questions about the same one are resampled together.
        variables: the variables of the task's prompt template.
        expected: the right answer: a number as text, `correct` or `incorrect`, the number of a step (0: none is wrong),
            or the human teacher's turn.
        has_mistake: whether the student's solution is wrong; None where no solution is shown.
    """

    problem_id: str
    variables: dict[str, Any] = field(hash=False)
    expected: str
    has_mistake: bool | None = None


CORRECT, INCORRECT = "correct", "incorrect"


def read_tasks(task: str, path: str, split: str) -> list[TutorTask]:
    """Read the questions of a task.

    Args:
        path: the folder with the files, or a file or a name on the Hub with the data of this task.

    Raises:
        DataError: naming file, row and field, if it cannot be read or is empty.
    """
    name = str(Path(path) / FILES[task]) if Path(path).is_dir() else path
    if task == PROBLEM_SOLVING:
        tasks = [_problem_task(where, row) for where, row in read_rows(name, split, _Gsm8kRow)]
    elif task in TEACHING:
        tasks = [_teaching_task(where, row) for where, row in read_rows(name, split, _BridgeRow)]
    else:
        rows = read_rows(name, split, _StepVerifyRow)
        tasks = [question for where, row in rows for question in _solution_tasks(task, where, row)]
    if not tasks:
        raise DataError(f"{name} holds no row.")
    return tasks


def _problem_task(where: str, row: _Gsm8kRow) -> TutorTask:
    _, mark, answer = row.answer.rpartition("####")
    if not mark or not last_number(answer):
        raise DataError(f"{where}: field answer does not end with '#### ' and a number: {row.answer[-60:]!r}.")
    return TutorTask(where, {"problem": row.question}, answer.replace(",", "").strip())


def _teaching_task(where: str, row: _BridgeRow) -> TutorTask:
    dialogue = _dialogue(row.dialog_history)
    if len(dialogue) < 2 or dialogue[-1]["role"] != "teacher":
        raise DataError(f"{where}: field dialog_history does not end with a teacher's answer to something.")
    variables = {"problem": row.problem, "solution": row.reference_solution, "conversation": dialogue[:-1]}
    return TutorTask(where, variables, dialogue[-1]["content"])


def _solution_tasks(task: str, where: str, row: _StepVerifyRow) -> Iterator[TutorTask]:
    """Two questions about the same problem, as in the benchmark: with the student's wrong solution, and with a right
    one."""
    dialogue = _dialogue(row.dialog_history)
    first = next((position for position, turn in enumerate(dialogue) if turn["role"] == "student"), None)
    if first is None:
        raise DataError(f"{where}: field dialog_history holds no turn of the student.")
    if not 0 <= row.incorrect_index < len(row.student_incorrect_solution):
        raise DataError(
            f"{where}: field incorrect_index is {row.incorrect_index}, but student_incorrect_solution has "
            f"{len(row.student_incorrect_solution)} steps."
        )
    # The last line of a reference solution is the final answer, those before it are the steps.
    final = row.reference_solution.strip().split("\n")[-1].replace(",", "").strip()
    right_steps = row.reference_solution.strip().split("\n")[:-1]
    for wrong in (True, False):
        steps = row.student_incorrect_solution[:-1] if wrong else right_steps
        answer = dialogue[first]["content"] if wrong else row.student_correct_response
        conversation = [*dialogue[:first], {"role": "student", "content": answer}]
        expected = {
            SOLUTION_CORRECTNESS: INCORRECT if wrong else CORRECT,
            MISTAKE_LOCATION: str(row.incorrect_index + 1 if wrong else 0),
            MISTAKE_CORRECTION: final,
        }[task]
        variables = {"problem": row.problem, "conversation": conversation, "steps": steps}
        yield TutorTask(where, variables, expected, wrong)


def _dialogue(utterances: Sequence[_Utterance]) -> list[dict[str, str]]:
    return [
        {"role": "student" if utterance.user == "Student" else "teacher", "content": utterance.text.strip()}
        for utterance in utterances
    ]


# Scores ------------------------------------------------------------------------------------------------------------


_VERDICT_PATTERN = re.compile(r"verdict\W*(correct|incorrect)\b", re.IGNORECASE)
_STEP_PATTERN = re.compile(r"first wrong step\W*(\d{1,3})\b", re.IGNORECASE)
_ANSWER_ALONE = {
    SOLUTION_CORRECTNESS: re.compile(r"\W*(correct|incorrect)\W*", re.IGNORECASE),
    MISTAKE_LOCATION: re.compile(r"\W*(?:step\W*)?(\d{1,3})\W*", re.IGNORECASE),
}
"""Patterns of a reply that consists of the answer alone."""


def read_answer(task: str, text: str) -> str | None:
    """Parse the answer in a reply; None if there is none.

    In `solution_correctness` it is the word after the last "Verdict:", in `mistake_location` the number after the last
    "First wrong step:", and in the other tasks the last \\boxed{…}. A reply that is only the answer counts, too.
    """
    if task not in _ANSWER_ALONE:
        return extract_boxed(text)
    if alone := _ANSWER_ALONE[task].fullmatch(text):
        return alone[1].lower()
    answers = (_VERDICT_PATTERN if task == SOLUTION_CORRECTNESS else _STEP_PATTERN).findall(text)
    return answers[-1].lower() if answers else None


async def score_answers(
    task: str, questions: Sequence[TutorTask], texts: Sequence[str | None], checker: AnswerChecker
) -> dict[str, Any]:
    """The figures of a task with one right answer for each question.

    Args:
        texts: the replies; None for a question without a reply, which is left out of all figures here.

    Returns:
        `accuracy`, with an interval over problems; `unreadable`, the number of answers that cannot be parsed; for tasks
        in which half of the solutions hold a mistake also `accuracy_with_mistake` and `accuracy_without`; and for
        `solution_correctness` the `f1` of detecting wrong solutions.
    """
    replied = [(question, text) for question, text in zip(questions, texts, strict=True) if text is not None]
    answers = [read_answer(task, text) for _, text in replied]
    is_right = [
        await _is_right(task, question, text, answer, checker)
        for (question, text), answer in zip(replied, answers, strict=True)
    ]
    about: dict[str, Any] = {
        "accuracy": _accuracy(replied, is_right),
        "unreadable": answers.count(None),
    }
    shares = {"accuracy_with_mistake": True, "accuracy_without": False}
    for name, has_mistake in shares.items():
        if any(question.has_mistake is not None for question, _ in replied):
            indices = [index for index, (question, _) in enumerate(replied) if question.has_mistake is has_mistake]
            about[name] = _accuracy([replied[index] for index in indices], [is_right[index] for index in indices])
    if task == SOLUTION_CORRECTNESS:
        expected = [question.expected == INCORRECT for question, _ in replied]
        about["f1"] = f1(expected, [answer == INCORRECT for answer in answers])
    return about


async def _is_right(task: str, question: TutorTask, text: str, answer: str | None, checker: AnswerChecker) -> bool:
    if answer is None:
        return False
    if task == MISTAKE_LOCATION:
        return int(answer) == int(question.expected)
    if task == SOLUTION_CORRECTNESS:
        return answer == question.expected
    return await checker.is_correct(text, question.expected)


def _accuracy(replied: Sequence[tuple[TutorTask, str]], right: Sequence[bool]) -> dict[str, Any]:
    by_problem: dict[str, list[float]] = {}
    for (question, _), value in zip(replied, right, strict=True):
        by_problem.setdefault(question.problem_id, []).append(float(value))
    return mean_with_ci(by_problem)


def f1(expected: Sequence[bool], predicted: Sequence[bool]) -> float | None:
    """The F1 score, the harmonic mean of precision and recall; None if nothing is expected or predicted."""
    hits = sum(is_expected and is_predicted for is_expected, is_predicted in zip(expected, predicted, strict=True))
    total = sum(expected) + sum(predicted)
    return 2 * hits / total if total else None


def win_rate(questions: Sequence[TutorTask], scores: Sequence[tuple[float, float] | None]) -> dict[str, Any]:
    """The share of questions in which the tutor's turn scores higher than the human teacher's, with an interval over
    dialogues.

    Args:
        scores: (tutor's score, teacher's score) for each question; None for one without a reply.
    """
    wins: dict[str, list[float]] = {}
    for question, pair in zip(questions, scores, strict=True):
        if pair is not None:
            wins.setdefault(question.problem_id, []).append(float(pair[0] > pair[1]))
    return mean_with_ci(wins)


# The whole benchmark -----------------------------------------------------------------------------------------------


_SPEAKERS = {"teacher": "Teacher", "student": "Student"}


async def do_tasks(config: EvalConfig, benchmark: BenchmarkConfig, folder: Path) -> dict[str, Any]:
    """Ask the tutor all questions of `benchmark.tasks`, and score its answers. The turns that it writes as a teacher
    are saved in `generations-<tutor>-<task>.json`, in the format of the benchmark's own scorer, all other replies in
    `replies-<task>.jsonl`.

    Returns:
        The entries of metrics.json. A teaching task's `win_rate` is None without `score_using_pedagogical_reward`.

    Raises:
        DataError: if a file of the benchmark cannot be read.
        ConfigError: if a model or key is missing.
        EngineFailure, ProviderFailure: if the tutor cannot be asked at all.
    """
    questions = {
        task: draw(
            read_tasks(task, benchmark.path, benchmark.split),
            lambda question: question.problem_id,
            benchmark.max_dialogues,
            config.seed,
        )
        for task in benchmark.tasks
    }
    prompts = {
        task: [render(benchmark.prompts_paths[task], **question.variables) for question in group]
        for task, group in questions.items()
    }
    scored = config.score_using_pedagogical_reward and any(task in TEACHING for task in questions)
    if scored:
        check_scorer(config)
    async with open_tutor(config, folder) as tutor:
        replies = {task: await tutor.answer(prompts[task], task) for task in questions}
        about = tutor.about()
    rates = await _win_rates(config, questions, replies) if scored else {}
    checker = AnswerChecker(config.generation.answer_timeout_s)
    tasks = {}
    try:
        for task, group in questions.items():
            replied = replies[task]
            counts = {"asked": len(group), "answered": len(group) - sum(replied.failures.values())}
            tasks[task] = counts | {"failures": dict(replied.failures), "cut": replied.cut}
            if task in TEACHING:
                tasks[task]["win_rate"] = rates.get(task)
                _write_generations(folder, str(about["tutor"]), task, group, replied.texts)
            else:
                tasks[task] |= await score_answers(task, group, replied.texts, checker)
                _write_replies(folder, task, group, replied.texts)
    finally:
        checker.shutdown()
    return about | {"tasks": tasks}


async def _win_rates(
    config: EvalConfig, questions: Mapping[str, Sequence[TutorTask]], replies: Mapping[str, Replies]
) -> dict[str, Any]:
    """Each teaching task's win rate. The reward model is loaded once for all tasks."""
    instruction = render(config.pedagogical_reward_prompt_path)
    dialogues: list[list[Message]] = []
    for task in (task for task in questions if task in TEACHING):
        for question, text in zip(questions[task], replies[task].texts, strict=True):
            if text is not None:
                dialogues += [_scored_dialogue(question, reply, instruction) for reply in (text, question.expected)]
    scores = iter(await score_dialogues(config, dialogues))
    return {
        task: win_rate(
            questions[task], [None if text is None else (next(scores), next(scores)) for text in replies[task].texts]
        )
        for task in questions
        if task in TEACHING
    }


def _scored_dialogue(question: TutorTask, reply: str, instruction: str) -> list[Message]:
    """The dialogue that the reward model scores, in the benchmark's format."""
    problem_text = f"Problem: {question.variables['problem']}\nReference Solution: {question.variables['solution']}"
    roles = {"teacher": "assistant", "student": "user"}
    turns = [{"role": roles[turn["role"]], "content": turn["content"]} for turn in question.variables["conversation"]]
    opening = [{"role": "system", "content": instruction}, {"role": "user", "content": problem_text}]
    return [*opening, *turns, {"role": "assistant", "content": reply}]


def _write_generations(
    folder: Path, tutor: str, task: str, questions: Sequence[TutorTask], texts: Sequence[str | None]
) -> None:
    tutor_name = re.sub(r"[^A-Za-z0-9._]+", "_", tutor.rsplit("/", 1)[-1])
    rows = []
    for question, text in zip(questions, texts, strict=True):
        turns = question.variables["conversation"]
        dialogue = [{"user": _SPEAKERS[turn["role"]], "text": turn["content"]} for turn in turns]
        row = {
            "problem": question.variables["problem"],
            "reference_solution": question.variables["solution"],
            "dialog_history": dialogue,
            "dialog_formatted": "\n".join(f"{turn['user']}: {turn['text']}" for turn in dialogue),
            "ground_truth_response": {"user": "Teacher", "text": question.expected},
            "generated_teacher_utterance": text,
        }
        rows += [row] if text is not None else []
    write_whole(folder / f"generations-{tutor_name}-{task}.json", json.dumps(rows, ensure_ascii=False, indent=1) + "\n")


def _write_replies(folder: Path, task: str, questions: Sequence[TutorTask], texts: Sequence[str | None]) -> None:
    lines = [
        {"problem": question.problem_id, "expected": question.expected, "reply": text}
        for question, text in zip(questions, texts, strict=True)
    ]
    path = folder / f"replies-{task}.jsonl"
    write_rows(path, lines)
