"""Reads a user's clone of MathTutorBench (github.com/eth-lre/mathtutorbench): for each task its prompt, shots, stop
texts and ground truth from `configs/`, and its data from `datasets/`, from the Hub or from a local copy.

Macina et al., "MathTutorBench", EMNLP 2025. Rows become questions as in the benchmark's own program, and its templates
are filled in as Jinja's defaults do it, so that prompts are the same to the character.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment

from classroom_rl.config.benchmark import (
    MISTAKE_CORRECTION,
    PEDAGOGY,
    PEDAGOGY_HARD,
    PROBLEM_SOLVING,
    SCAFFOLDING,
    SCAFFOLDING_HARD,
    SOCRATIC_QUESTIONING,
    SOLUTION_CORRECTNESS,
    BenchmarkConfig,
)
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.checked_rows import PublishedRow, checked
from classroom_rl.judges.moves.labelled import numbered_rows
from classroom_rl.rollout.datasets import load_from_hub

TEACHING = (SCAFFOLDING, PEDAGOGY, SCAFFOLDING_HARD, PEDAGOGY_HARD)
"""The tasks in which the tutor writes a teacher's turn."""

_FILES = {
    PROBLEM_SOLVING: ("problem_solving", "gsm8k"),
    SOLUTION_CORRECTNESS: ("student_solution_correctness", "solution_correctness"),
}
"""The names of a task's file in `configs/`, the newest first, where it is not the task's own name."""
_ON_THE_HUB = {"gsm8k": "openai/gsm8k"}
"""The full names of data sets that the configs name without their owner, which the Hub only redirects."""
_SCORER = Path("reward_model/compute_scaffolding_score.py")
_TEMPLATES = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)


class TaskFile(PublishedRow):
    """A task in `configs/`. `few_shot_samples` are the shots as one text; `stop` ends an answer."""

    dataset_path: str
    dataset_name: str | None = None
    test_split: str = "test"
    system_prompt: str
    ground_truth_format: str = ""
    few_shot_samples: str | None = None
    stop: list[str] | None = None


class _Utterance(PublishedRow):
    user: str
    text: str


class _ProblemRow(PublishedRow):
    """A row of GSM8K: `main` ends an answer with "#### 72", `socratic` begins each of its lines with a question."""

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
class Question:
    """One question to a tutor.

    Attributes:
        problem_id: names the row; questions about the same one are resampled together.
        prompt: what the tutor is sent.
        expected: the right answer, as the task's `ground_truth_format` writes it; "" where there is none.
        variables: what the templates may use.
    """

    problem_id: str
    prompt: str
    expected: str
    variables: dict[str, Any] = field(hash=False)


def read_task_file(clone: Path, task: str) -> TaskFile:
    """Read a task's file in `configs/`. Raises `DataError` if there is none, or it is not as the benchmark's program
    reads it."""
    paths = [clone / "configs" / f"{stem}.yaml" for stem in _FILES.get(task, (task,))]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise DataError(
            f"There is no {' or '.join(map(str, paths))}. benchmark.path must be a clone of the benchmark: git clone "
            "https://github.com/eth-lre/mathtutorbench"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())
        raise DataError(
            f"{path} is no YAML, and the benchmark's own program cannot read it either; correct the file: {message}"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no mapping.")
    return checked(TaskFile, str(path), content)


def read_questions(benchmark: BenchmarkConfig, task: str, file: TaskFile) -> list[Question]:
    """The questions of a task, in the order of its rows. Raises `DataError`, naming file, row and field or template, if
    a row or a template cannot be read, or there is no row."""
    label = benchmark.prompts_paths.get(task, f"system_prompt of {task}")
    prompt = _template(Path(label).read_text("utf-8") if task in benchmark.prompts_paths else file.system_prompt, label)
    truth = _template(file.ground_truth_format, f"ground_truth_format of {task}")
    examples_of = _EXAMPLES.get(task, partial(_solution_examples, with_right_ones=task != MISTAKE_CORRECTION))
    questions = []
    for where, row in _rows(benchmark, file):
        for example in examples_of(where, row):
            variables = example | {"shots": file.few_shot_samples}
            questions.append(Question(where, prompt(where, variables), truth(where, variables), variables))
    if not questions:
        raise DataError(f"{file.dataset_path} holds no row for {task}.")
    return questions


def reward_instruction(clone: Path) -> str:
    """The instruction that the benchmark's scorer gives its reward model, from the constant in its program. Raises
    `DataError` if it cannot be found."""
    path = clone / _SCORER
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        values = [
            ast.literal_eval(node.value)
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SYSTEM_PROMPT"
        ]
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"The reward model's instruction cannot be read from {path}: {error}.") from error
    if not values or not isinstance(values[0], str):
        raise DataError(f"{path} has no text SYSTEM_PROMPT, the reward model's instruction.")
    return values[0]


def _template(text: str, label: str) -> Callable[[str, dict[str, Any]], str]:
    """A function of a row's place and its variables."""
    try:
        template = _TEMPLATES.from_string(text)
    except jinja2.TemplateError as error:
        raise DataError(f"The template {label} does not parse: {error}.") from error

    def fill_in(where: str, variables: dict[str, Any]) -> str:
        try:
            return template.render(**variables)
        except Exception as error:  # whatever an expression in the template raises
            raise DataError(f"{where}: the template {label} cannot be filled in: {error}.") from error

    return fill_in


def _rows(benchmark: BenchmarkConfig, file: TaskFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a task's data set, each with its place for messages."""
    name, subset, copies = file.dataset_path, file.dataset_name, benchmark.datasets
    location = copies.get(f"{name}/{subset}", copies.get(name))
    if location is None and name.endswith(".json"):
        # The configs of older revisions name the folder differently than it is named.
        paths = [Path(benchmark.path) / name, Path(benchmark.path) / "datasets" / Path(name).name]
        location = str(next((path for path in paths if path.is_file()), paths[0]))
    location = location or _ON_THE_HUB.get(name, name)
    if location.endswith((".json", ".jsonl", ".parquet")):
        yield from numbered_rows(location, file.test_split)
    else:
        try:
            rows = load_from_hub(location, file.test_split, subset)
        except DataError as error:
            raise DataError(f"{error} For a local copy: benchmark.datasets={{{name}: PATH}}.") from error
        for number, row in enumerate(rows, start=1):
            yield f"{location} ({subset}, {file.test_split}): row {number}", row


def _problem_examples(where: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield row | checked(_ProblemRow, where, row).model_dump()


def _teaching_examples(where: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parsed = checked(_BridgeRow, where, row)
    turns = parsed.dialog_history
    if len(turns) < 2 or turns[-1].user == "Student":
        raise DataError(f"{where}: field dialog_history does not end with a teacher's answer to something.")
    lines = [f"{'Student' if turn.user == 'Student' else 'Teacher'}: {turn.text}" for turn in turns[:-1]]
    yield {
        "question": parsed.problem,
        "conversation_json": [turn.model_dump() for turn in turns[:-1]],
        "ground_truth_response": turns[-1].model_dump(),
        "dialog_history": "\n".join(lines),
        "reference_solution": parsed.reference_solution,
    }


def _solution_examples(where: str, row: dict[str, Any], with_right_ones: bool) -> Iterator[dict[str, Any]]:
    """The student's wrong solution and, if wanted, the reference solution in its place."""
    parsed = checked(_StepVerifyRow, where, row)
    turns = parsed.dialog_history
    student_position = next((position for position, turn in enumerate(turns) if turn.user == "Student"), None)
    if student_position is None:
        raise DataError(f"{where}: field dialog_history holds no turn of the student.")
    for is_wrong in (True, False) if with_right_ones else (True,):
        steps = parsed.student_incorrect_solution if is_wrong else parsed.reference_solution.split("\n")
        numbered = [f"Step {number} - {step}" for number, step in enumerate(steps[:-1], start=1)]
        yield {
            "question": parsed.problem,
            "student_solution": "\\n".join(numbered),  # a backslash and an n, as in the benchmark's program
            "is_error": is_wrong,
            "error_step": parsed.incorrect_index + 1 if is_wrong else 0,
            "dialog_history": "\n".join(f"Teacher: {turn.text}" for turn in turns[:student_position]),
            "student_chat_solution": turns[student_position].text if is_wrong else parsed.student_correct_response,
            "reference_solution": parsed.reference_solution,
        }


_EXAMPLES: dict[str, Callable[[str, dict[str, Any]], Iterator[dict[str, Any]]]] = {
    PROBLEM_SOLVING: _problem_examples,
    SOCRATIC_QUESTIONING: _problem_examples,
    **dict.fromkeys(TEACHING, _teaching_examples),
}
"""Task → the function that makes examples of a row; the other tasks are on solutions."""
