"""Runs MathTutorBench as its authors do: the tutor answers the clone's prompts, as completions or as a chat, and its
answers are scored by the benchmark's formulas.

One thing differs: thoughts in `<think>` are removed before an answer is read.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from classroom_rl.config.benchmark import BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import ConfigError, DataError, ProviderFailure
from classroom_rl.evaluation.published.checked_rows import draw, write_rows
from classroom_rl.evaluation.published.mathtutorbench.clone import TEACHING, Question, read_questions, read_task_file
from classroom_rl.evaluation.published.mathtutorbench.measures import MEASURES
from classroom_rl.evaluation.published.mathtutorbench.rewards import Turns, why_not_scored, win_rates
from classroom_rl.evaluation.published.tutor import BARE, SYSTEM, Replies, open_tutor
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.system.storage import write_whole

logger = logging.getLogger(__name__)


async def do_tasks(config: EvalConfig, benchmark: BenchmarkConfig, folder: Path) -> dict[str, Any]:
    """Ask the tutor all questions of `benchmark.tasks`, and score its answers. The turns that it writes as a teacher
    are saved in `generations-<tutor>-<task>.json`, in the format of the benchmark's own scorer, all other replies in
    `replies-<task>.jsonl`. In metrics.json, a task without its `value` has the reason in `why`."""
    files = {task: read_task_file(Path(benchmark.path), task) for task in benchmark.tasks}
    questions = {
        task: draw(
            _read(benchmark, task, file), lambda question: question.problem_id, benchmark.max_dialogues, config.seed
        )
        for task, file in files.items()
    }
    _warn_of_unused(benchmark, files.values())
    has_turns = any(task in TEACHING for task in questions)
    why = why_not_scored(config) if has_turns else None
    if why is not None:
        logger.warning("turns are written but not scored: %s", why)
    form = SYSTEM if benchmark.is_chat else BARE
    async with open_tutor(config, folder) as tutor:
        replies = {
            task: await tutor.answer_as(form, [question.prompt for question in group], files[task].stop or (), task)
            for task, group in questions.items()
        }
        about = tutor.about()
    tasks = {task: _figures(task, questions[task], replies[task]) for task in questions}
    turns = {task: _answered(questions[task], replies[task]) for task in questions if task in TEACHING}
    for task in questions:
        if task in turns:
            _write_generations(folder, str(about["tutor"]), task, turns[task])
        else:
            _write_replies(folder, task, questions[task], replies[task])
    if has_turns:
        await _add_win_rates(config, turns, tasks, why)
    return about | {"is_chat": benchmark.is_chat, "drawn": benchmark.max_dialogues >= 0, "tasks": tasks}


def _read(benchmark: BenchmarkConfig, task: str, file: Any) -> list[Question]:
    """A task's questions, each with a ground truth that can be scored."""
    questions = read_questions(benchmark, task, file)
    for question in questions:
        try:
            MEASURES[task].target(question.expected)
        except ValueError as error:
            raise DataError(
                f"{question.problem_id}: the ground truth of {task}, by its ground_truth_format, is "
                f"{question.expected[:80]!r}: {error}."
            ) from error
    return questions


def _warn_of_unused(benchmark: BenchmarkConfig, files: Any) -> None:
    dataset_names = {name for file in files for name in (file.dataset_path, f"{file.dataset_path}/{file.dataset_name}")}
    if unused := sorted(set(benchmark.datasets) - dataset_names):
        logger.warning("benchmark.datasets names %s, which no asked task reads", ", ".join(unused))


def _answered(questions: Sequence[Question], replies: Replies) -> list[tuple[Question, str]]:
    pairs = zip(questions, replies.texts, strict=True)
    return [(question, text) for question, text in pairs if text is not None]


def _figures(task: str, questions: Sequence[Question], replies: Replies) -> dict[str, Any]:
    """The entry of a task: counts, all figures, and the one of the leaderboard as `value` with its interval. Questions
    without a reply are in no figure."""
    measure, answered = MEASURES[task], _answered(questions, replies)
    parsed = [measure.parse(text) for _, text in answered]
    answers = [measure.default if answer is None else answer for answer in parsed]
    targets = [measure.target(question.expected) for question, _ in answered]
    figures = measure.total(answers, targets) if answered else {}
    by_problem: dict[str, list[float]] = {}
    if measure.each is not None:
        for (question, _), answer, target in zip(answered, answers, targets, strict=True):
            score = measure.each(answer, target)
            by_problem.setdefault(question.problem_id, []).extend([] if score is None else [score])
    return {
        "asked": len(questions),
        "answered": len(answered),
        "failures": dict(replies.failures),
        "cut": replies.cut,
        "unreadable": parsed.count(None),
        "figure": measure.figure,
        "value": figures.get(measure.figure),
        "ci95": mean_with_ci(by_problem)["ci95"],
        "figures": figures,
        "why": None if answered else "no question was answered",
    }


async def _add_win_rates(
    config: EvalConfig, turns: Mapping[str, Turns], tasks: Mapping[str, dict[str, Any]], why: str | None
) -> None:
    """Add the win rates to the entries of the teaching tasks, or the reason why there are none."""
    turns_by_task = {task: group for task, group in turns.items() if group}
    rates: dict[str, dict[str, Any]] = {}
    if why is None and turns_by_task:
        try:
            rates = await win_rates(config, turns_by_task)
        except (ConfigError, DataError, ProviderFailure) as error:  # the turns are paid for: the other figures stand
            why = str(error)
            logger.warning("turns are written but not scored: %s", why)
    for task in turns_by_task:
        if task in rates:
            rate = rates[task].pop("win_rate")
            figures = tasks[task]["figures"] | {"win_rate": rate["mean"]} | rates[task]
            tasks[task] |= {"value": rate["mean"], "ci95": rate["ci95"], "figures": figures}
        else:
            tasks[task]["why"] = why


def _write_generations(folder: Path, tutor: str, task: str, turns: Turns) -> None:
    name = re.sub(r"[^A-Za-z0-9._]+", "_", tutor.rsplit("/", 1)[-1])
    rows = [
        {
            "problem": question.variables["question"],
            "reference_solution": question.variables["reference_solution"],
            "dialog_history": question.variables["conversation_json"],
            "dialog_formatted": question.variables["dialog_history"],
            "ground_truth_response": question.variables["ground_truth_response"],
            "generated_teacher_utterance": text,
        }
        for question, text in turns
    ]
    write_whole(folder / f"generations-{name}-{task}.json", json.dumps(rows, ensure_ascii=False, indent=1) + "\n")


def _write_replies(folder: Path, task: str, questions: Sequence[Question], replies: Replies) -> None:
    lines = [
        {"problem": question.problem_id, "expected": question.expected, "reply": text}
        for question, text in zip(questions, replies.texts, strict=True)
    ]
    write_rows(folder / f"replies-{task}.jsonl", lines)
