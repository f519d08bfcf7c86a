"""Reads the data of MathTutorBench: the questions of each task and their right answers.

Macina et al., "MathTutorBench", EMNLP 2025. The files are those in the folder `dataset` of its repository, and GSM8K's
test set. The prompts are our own, so results are not comparable with those of the benchmark's leaderboard.
"""

from collections.abc import Iterator, Sequence
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
)
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.checked_rows import PublishedRow, read_rows
from classroom_rl.judges.moves.rules import last_number

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
