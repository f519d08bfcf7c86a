"""The student's solutions to the problems before any dialogue."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Optional

from pydantic import TypeAdapter

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.errors import RequestRefused
from classroom_rl.evaluation.progress import EvaluationProgress, gather_or_stop
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.system.storage import storage_errors

logger = logging.getLogger(__name__)

PROBLEMS_AT_ONCE = 64
InitialSolutions = dict[str, list[Solution]]
"""Problem id → the graded solutions to it."""
_FILE = TypeAdapter(InitialSolutions)


async def initial_solutions(
    config: EvalConfig, problems: Sequence[Problem], roles: Optional[Roles], folder: Path
) -> Optional[InitialSolutions]:
    """The student's solutions before the dialogue: `generation.number_student_attempts` for each problem, in answer to
    `generation.student_attempt_prompt_path` alone. They do not depend on the tutor, so all conversations on a problem
    are compared with the same solutions.

    With `recompute_initial_attempts` the student in `roles` writes them now, and they are saved in the run folder as
    `initial_solutions/{key}.json`. The key is a hash of the student (its name and its sampling), the prompts, the
    problems, the number and length of attempts, the seed, and the grader. Without `recompute_initial_attempts` they are
    read from the file that an earlier evaluation with the same settings and the same `logging.save_dir` wrote.

    A problem that the student's provider refuses has no initial solutions.

    Returns:
        The solutions; None if the file should be read and does not exist. There is then no initial solve rate.
    """
    path = folder / "initial_solutions" / f"{_key(config, problems)}.json"
    if not config.recompute_initial_attempts:
        if path.is_file():
            return _FILE.validate_json(path.read_bytes())
        logger.warning(
            "recompute_initial_attempts is false and there is no %s: the initial solve rate and the gain are left out.",
            path,
        )
        return None
    solutions = await _solve(config, problems, roles)
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(_FILE.dump_json(solutions, indent=1))
        unfinished.replace(path)
    return solutions


async def _solve(config: EvalConfig, problems: Sequence[Problem], roles: Roles) -> InitialSolutions:
    slots = asyncio.Semaphore(PROBLEMS_AT_ONCE)
    by_id = {problem.id: problem for problem in problems}
    progress = EvaluationProgress(len(by_id), "the student alone", "problems")

    async def solve(problem: Problem) -> Optional[list[Solution]]:
        async with slots:
            attempts = range(config.generation.number_student_attempts)
            solving = (_attempt(config, problem, i, roles) for i in attempts)
            solutions = await asyncio.gather(*solving, return_exceptions=True)
        progress.add(1)
        # A problem is left out if all its failures are refusals; any other failure stops the evaluation.
        failures = [outcome for outcome in solutions if isinstance(outcome, BaseException)]
        if all(isinstance(failure, RequestRefused) for failure in failures):
            if failures:
                logger.warning("problem %s has no initial solutions: %s", problem.id, failures[0])
            return None if failures else solutions
        raise next(failure for failure in failures if not isinstance(failure, RequestRefused))

    try:
        solutions_of_problems = await gather_or_stop(map(solve, by_id.values()))
    finally:
        progress.close()
    return {
        problem_id: solutions
        for problem_id, solutions in zip(by_id, solutions_of_problems, strict=True)
        if solutions is not None
    }


async def _attempt(config: EvalConfig, problem: Problem, number: int, roles: Roles) -> Solution:
    digest = hashlib.sha256(f"{config.seed}|{problem.id}|alone|{number}".encode()).digest()
    limit = config.generation.max_tokens_per_student_attempt
    sampling = replace(roles.student_sampling, max_tokens=limit, seed=int.from_bytes(digest[:4]))
    reply = await roles.student.chat([{"role": "user", "content": _prompt(config, problem)}], sampling)
    return Solution(reply.text, await roles.grade(problem, visible_text(reply.text)))


def _prompt(config: EvalConfig, problem: Problem) -> str:
    return render(config.generation.student_attempt_prompt_path, problem=problem.text)


def _key(config: EvalConfig, problems: Sequence[Problem]) -> str:
    generation, student = config.generation, config.student_model
    prompts = [_prompt(config, problem) for problem in problems] if generation.student_attempt_prompt_path else []
    parts = {
        "student": student.model_name_or_path,
        "sampling": {name: asdict(student.vllm)[name] for name in ("temperature", "top_k", "top_p", "max_length")},
        "prompts": prompts,
        "problems": [problem.id for problem in problems],
        "attempts": generation.number_student_attempts,
        "tokens": generation.max_tokens_per_student_attempt,
        "seed": config.seed,
        "grader": config.reward_model.model_name_or_path,
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
