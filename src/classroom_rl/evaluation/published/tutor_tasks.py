"""MathTutorBench: a tutor's tasks. Turns that it writes as a teacher are scored by the pedagogical reward model."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from classroom_rl.config.benchmark import BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.evaluation.metrics.pedagogical_reward import check_scorer, score_dialogues
from classroom_rl.evaluation.published.checked_rows import draw
from classroom_rl.evaluation.published.mathtutorbench import TEACHING, TutorTask, read_tasks
from classroom_rl.evaluation.published.task_scores import score_answers, win_rate
from classroom_rl.evaluation.published.tutor import Replies, open_tutor
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.prompts import render
from classroom_rl.system.storage import write_whole

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
