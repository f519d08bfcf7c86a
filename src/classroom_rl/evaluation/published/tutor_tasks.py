"""MathTutorBench: a tutor's tasks, and what its answers are worth. Turns that it writes as a teacher are scored by a
reward model; an answer that cannot be read counts as wrong.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from classroom_rl.config.benchmark import MISTAKE_LOCATION, SOLUTION_CORRECTNESS, BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.evaluation.metrics.pedagogical_reward import check_scorer, score_dialogues
from classroom_rl.evaluation.published.checked_rows import draw
from classroom_rl.evaluation.published.mathtutorbench import INCORRECT, TEACHING, TutorTask, read_tasks
from classroom_rl.evaluation.published.tutor import Replies, open_tutor
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.grading.forms import extract_boxed
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.prompts import render
from classroom_rl.system.storage import write_whole

_VERDICT = re.compile(r"verdict\W*(correct|incorrect)\b", re.IGNORECASE)
_STEP = re.compile(r"first wrong step\W*(\d{1,3})\b", re.IGNORECASE)
_ALONE = {
    SOLUTION_CORRECTNESS: re.compile(r"\W*(correct|incorrect)\W*", re.IGNORECASE),
    MISTAKE_LOCATION: re.compile(r"\W*(?:step\W*)?(\d{1,3})\W*", re.IGNORECASE),
}
"""An answer that is nothing but what was asked for."""


def read_answer(task: str, text: str) -> str | None:
    """The answer in a reply; None if it holds none.

    In `solution_correctness` it is what follows the last "Verdict:", in `mistake_location` the number after the last
    "First wrong step:", and in the others the last \\boxed{…}. A reply of nothing but the answer counts, too.
    """
    if task not in _ALONE:
        return extract_boxed(text)
    if alone := _ALONE[task].fullmatch(text):
        return alone[1].lower()
    found = (_VERDICT if task == SOLUTION_CORRECTNESS else _STEP).findall(text)
    return found[-1].lower() if found else None


async def score_answers(
    task: str, asked: Sequence[TutorTask], texts: Sequence[str | None], checker: AnswerChecker
) -> dict[str, Any]:
    """The figures of a task with one right answer for each question.

    Args:
        texts: the replies; None for a question without a reply, which enters no figure but `failures` elsewhere.

    Returns:
        `accuracy`, with an interval over problems; `unreadable`; where half of the solutions hold a mistake also
        `accuracy_with_mistake` and `accuracy_without`; and, for `solution_correctness`, `f1` of finding the wrong ones.
    """
    replied = [(each, text) for each, text in zip(asked, texts, strict=True) if text is not None]
    answers = [read_answer(task, text) for _, text in replied]
    right = [
        await _is_right(task, each, text, answer, checker)
        for (each, text), answer in zip(replied, answers, strict=True)
    ]
    about: dict[str, Any] = {
        "accuracy": _accuracy(replied, right),
        "unreadable": answers.count(None),
    }
    kinds = {"accuracy_with_mistake": True, "accuracy_without": False}
    for name, kind in kinds.items():
        if any(each.has_mistake is not None for each, _ in replied):
            places = [place for place, (each, _) in enumerate(replied) if each.has_mistake is kind]
            about[name] = _accuracy([replied[place] for place in places], [right[place] for place in places])
    if task == SOLUTION_CORRECTNESS:
        about["f1"] = f1([each.expected == INCORRECT for each, _ in replied], [each == INCORRECT for each in answers])
    return about


async def _is_right(task: str, asked: TutorTask, text: str, answer: str | None, checker: AnswerChecker) -> bool:
    if answer is None:
        return False
    if task == MISTAKE_LOCATION:
        return int(answer) == int(asked.expected)
    if task == SOLUTION_CORRECTNESS:
        return answer == asked.expected
    return await checker.is_correct(text, asked.expected)


def _accuracy(replied: Sequence[tuple[TutorTask, str]], right: Sequence[bool]) -> dict[str, Any]:
    by_problem: dict[str, list[float]] = {}
    for (each, _), value in zip(replied, right, strict=True):
        by_problem.setdefault(each.problem_id, []).append(float(value))
    return mean_with_ci(by_problem)


def f1(expected: Sequence[bool], found: Sequence[bool]) -> float | None:
    """The harmonic mean of precision and recall of what was found; None if there was nothing to find and nothing was
    found."""
    hits = sum(want and has for want, has in zip(expected, found, strict=True))
    total = sum(expected) + sum(found)
    return 2 * hits / total if total else None


def win_rate(asked: Sequence[TutorTask], scores: Sequence[tuple[float, float] | None]) -> dict[str, Any]:
    """How often the tutor's turn has a higher score than the human teacher's, by dialogue.

    Args:
        scores: the tutor's score and the teacher's of each question; None for one without a reply.
    """
    wins: dict[str, list[float]] = {}
    for each, pair in zip(asked, scores, strict=True):
        if pair is not None:
            wins.setdefault(each.problem_id, []).append(float(pair[0] > pair[1]))
    return mean_with_ci(wins)


_SPEAKERS = {"teacher": "Teacher", "student": "Student"}


async def do_tasks(config: EvalConfig, benchmark: BenchmarkConfig, folder: Path) -> dict[str, Any]:
    """Ask the tutor all questions of `benchmark.tasks`, and score its answers. The turns that it writes as a teacher go
    into `generations-<tutor>-<task>.json`, in the form that the benchmark's own scorer reads, all other replies into
    `replies-<task>.jsonl`.

    Returns:
        The entries of metrics.json. A teaching task's `win_rate` is None where no reward model was to score it.

    Raises:
        DataError: if a file of the benchmark cannot be read.
        ConfigError: if a model or key is missing.
        EngineFailure, ProviderFailure: if the tutor cannot be asked at all.
    """
    asked = {
        task: draw(
            read_tasks(task, benchmark.path, benchmark.split),
            lambda each: each.problem_id,
            benchmark.max_dialogues,
            config.seed,
        )
        for task in benchmark.tasks
    }
    prompts = {
        task: [render(benchmark.prompts_paths[task], **each.variables) for each in group]
        for task, group in asked.items()
    }
    scored = config.score_using_pedagogical_reward and any(task in TEACHING for task in asked)
    if scored:
        check_scorer(config)
    async with open_tutor(config, folder) as tutor:
        replies = {task: await tutor.answer(prompts[task], task) for task in asked}
        about = tutor.about()
    rates = await _win_rates(config, asked, replies) if scored else {}
    checker = AnswerChecker(config.generation.answer_timeout_s)
    tasks = {}
    try:
        for task, group in asked.items():
            found = replies[task]
            counts = {"asked": len(group), "answered": len(group) - sum(found.failures.values())}
            tasks[task] = counts | {"failures": dict(found.failures), "cut": found.cut}
            if task in TEACHING:
                tasks[task]["win_rate"] = rates.get(task)
                _write_generations(folder, str(about["tutor"]), task, group, found.texts)
            else:
                tasks[task] |= await score_answers(task, group, found.texts, checker)
                _write_replies(folder, task, group, found.texts)
    finally:
        checker.shutdown()
    return about | {"tasks": tasks}


async def _win_rates(
    config: EvalConfig, asked: Mapping[str, Sequence[TutorTask]], replies: Mapping[str, Replies]
) -> dict[str, Any]:
    """Each teaching task's win rate. The model is loaded once, for all of them."""
    instruction = render(config.pedagogical_reward_prompt_path)
    dialogues: list[list[Message]] = []
    for task in (task for task in asked if task in TEACHING):
        for each, text in zip(asked[task], replies[task].texts, strict=True):
            if text is not None:
                dialogues += [_scored(each, said, instruction) for said in (text, each.expected)]
    scores = iter(await score_dialogues(config, dialogues))
    return {
        task: win_rate(
            asked[task], [None if text is None else (next(scores), next(scores)) for text in replies[task].texts]
        )
        for task in asked
        if task in TEACHING
    }


def _scored(asked: TutorTask, said: str, instruction: str) -> list[Message]:
    """The dialogue that the reward model scores, in the form of the benchmark."""
    about = f"Problem: {asked.variables['problem']}\nReference Solution: {asked.variables['solution']}"
    roles = {"teacher": "assistant", "student": "user"}
    turns = [{"role": roles[each["role"]], "content": each["content"]} for each in asked.variables["conversation"]]
    opening = [{"role": "system", "content": instruction}, {"role": "user", "content": about}]
    return [*opening, *turns, {"role": "assistant", "content": said}]


def _write_generations(
    folder: Path, tutor: str, task: str, asked: Sequence[TutorTask], texts: Sequence[str | None]
) -> None:
    plain = re.sub(r"[^A-Za-z0-9._]+", "_", tutor.rsplit("/", 1)[-1])
    rows = []
    for each, text in zip(asked, texts, strict=True):
        said = [{"user": _SPEAKERS[turn["role"]], "text": turn["content"]} for turn in each.variables["conversation"]]
        row = {
            "problem": each.variables["problem"],
            "reference_solution": each.variables["solution"],
            "dialog_history": said,
            "dialog_formatted": "\n".join(f"{turn['user']}: {turn['text']}" for turn in said),
            "ground_truth_response": {"user": "Teacher", "text": each.expected},
            "generated_teacher_utterance": text,
        }
        rows += [row] if text is not None else []
    write_whole(folder / f"generations-{plain}-{task}.json", json.dumps(rows, ensure_ascii=False, indent=1) + "\n")


def _write_replies(folder: Path, task: str, asked: Sequence[TutorTask], texts: Sequence[str | None]) -> None:
    lines = [
        {"problem": each.problem_id, "expected": each.expected, "reply": text}
        for each, text in zip(asked, texts, strict=True)
    ]
    path = folder / f"replies-{task}.jsonl"
    write_whole(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
