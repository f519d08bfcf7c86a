"""Measures of maths conversations: the student's solutions before the dialogue, solve rates, rejections by rule, and a
pedagogical reward model's scores of the tutor's messages, each given the dialogue before it.

Intervals are bootstrapped over problems. The reward model is that of Macina et al., "MathTutorBench" (EMNLP 2025), or
another one with a single logit.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Optional

from pydantic import TypeAdapter

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.models import ModelConfig
from classroom_rl.config.values import END_OF_CONVERSATION, SCORING_RULES
from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.errors import ConfigError, RequestRefused
from classroom_rl.evaluation.progress import EvaluationProgress, gather_or_stop
from classroom_rl.models.pretrained import check_model, load_tokenizer
from classroom_rl.results.statistics import ByLesson, counted_share, estimates, lacks_verdict
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.system.storage import storage_errors, write_whole

logger = logging.getLogger(__name__)

SOLVED, SCORED, PEDAGOGICAL_REWARD = "solve_rate", "solution_score", "pedagogical_reward"
"""Keys of metrics.json: the grades of solutions, as the share of right answers or the mean score of a reward model; and
the reward model's scores of the tutor's messages."""


def summarise_maths(
    records: Sequence[ConversationRecord],
    initial: Optional[Mapping[str, Sequence[Solution]]],
    message_scores: Optional[Sequence[Sequence[float]]],
    by_answer: bool,
) -> dict[str, Any]:
    """Compute the part of metrics.json that only maths conversations have.

    Conversations without a verdict are used only for the pedagogical reward and the initial grades; `without_verdict`
    is their share. Conversations with a verdict but no solutions (rejected in hard mode) are left out of the final
    solve rate and of the gain; `without_solutions` is their share.

    Args:
        initial: the student's graded solutions before the dialogue, by problem id; None if there are none.
        message_scores: for each record the pedagogical reward of each teacher message; None if not measured.
        by_answer: True if grades are 1 or 0 (right or wrong), False if they are a reward model's scores.
    """
    judged = [record for record in records if not lacks_verdict(record)]
    figures = maths_by_problem(records, initial, message_scores, by_answer)
    return {"without_solutions": counted_share(not record.solutions for record in judged), **estimates(figures)}


def maths_by_problem(
    records: Sequence[ConversationRecord],
    initial: Optional[Mapping[str, Sequence[Solution]]],
    message_scores: Optional[Sequence[Sequence[float]]],
    by_answer: bool,
) -> ByLesson:
    """The values of the figures of maths conversations; arguments as in `summarise_maths`.

    `solve_rate/…` (`solution_score/…` for a reward model's scores), one value for each conversation: `final`, the mean
    grade after the dialogue; `initial`, that before it, whatever the outcome of the conversation; `gain`, the
    difference. `initial` and `gain` cover the problems that have initial solutions.

    `rejecting_attempts/RULE`, for each rule that accepts or rejects: the share of a conversation's valid attempts that
    rejected it.

    `pedagogical_reward/micro`: one value for each teacher message; `macro`: each conversation's mean. Conversations
    without a teacher message are left out of both.
    """
    grades = SOLVED if by_answer else SCORED
    figures: ByLesson = {}
    before = {problem: fmean(solution.grade for solution in group) for problem, group in (initial or {}).items()}
    for name in ("final", *(("initial", "gain") if initial is not None else ())):
        figures[f"{grades}/{name}"] = {}
    if message_scores is not None:
        figures |= {f"{PEDAGOGICAL_REWARD}/micro": {}, f"{PEDAGOGICAL_REWARD}/macro": {}}
    for index, record in enumerate(records):
        for key, value in [*_grades(record, before.get(record.problem_id), grades), *_rejecting_attempts(record)]:
            figures.setdefault(key, {}).setdefault(record.problem_id, []).append(value)
        if message_scores is not None and message_scores[index]:
            scores = message_scores[index]
            figures[f"{PEDAGOGICAL_REWARD}/micro"].setdefault(record.problem_id, []).extend(scores)
            figures[f"{PEDAGOGICAL_REWARD}/macro"].setdefault(record.problem_id, []).append(fmean(scores))
    return figures


def _grades(record: ConversationRecord, before: Optional[float], key: str) -> Iterator[tuple[str, float]]:
    if before is not None:
        yield f"{key}/initial", before
    if record.solutions and not lacks_verdict(record):
        final = fmean(solution.grade for solution in record.solutions)
        yield f"{key}/final", final
        if before is not None:
            yield f"{key}/gain", final - before


def _rejecting_attempts(record: ConversationRecord) -> Iterator[tuple[str, float]]:
    if lacks_verdict(record):
        return
    for rule in dict.fromkeys(verdict.rule for verdict in record.verdicts if verdict.rule not in SCORING_RULES):
        valid = [verdict.accepted is False for verdict in record.verdicts if verdict.rule == rule and verdict.valid]
        if valid:  # none where every attempt refused the content
            yield f"rejecting_attempts/{rule}", fmean(valid)


# The student's solutions before the dialogue -----------------------------------------------------------------------


PROBLEMS_AT_ONCE = 64
InitialSolutions = dict[str, list[Solution]]
"""Problem id → the graded solutions to it."""
_SOLUTIONS_FILE = TypeAdapter(InitialSolutions)


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
            return _SOLUTIONS_FILE.validate_json(path.read_bytes())
        logger.warning(
            "recompute_initial_attempts is false and there is no %s: the initial solve rate and the gain are left out.",
            path,
        )
        return None
    solutions = await _solve(config, problems, roles)
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
    write_whole(path, _SOLUTIONS_FILE.dump_json(solutions, indent=1).decode())
    return solutions


async def _solve(config: EvalConfig, problems: Sequence[Problem], roles: Roles) -> InitialSolutions:
    slots = asyncio.Semaphore(PROBLEMS_AT_ONCE)
    by_id = {problem.id: problem for problem in problems}

    async def solve(problem: Problem) -> Optional[list[Solution]]:
        async with slots:
            attempts = range(config.generation.number_student_attempts)
            solving = (_attempt(config, problem, attempt, roles) for attempt in attempts)
            solutions = await asyncio.gather(*solving, return_exceptions=True)
        progress.add(1)
        # A problem is left out if all its failures are refusals; any other failure stops the evaluation.
        failures = [outcome for outcome in solutions if isinstance(outcome, BaseException)]
        if all(isinstance(failure, RequestRefused) for failure in failures):
            if failures:
                logger.warning("problem %s has no initial solutions: %s", problem.id, failures[0])
            return None if failures else solutions
        raise next(failure for failure in failures if not isinstance(failure, RequestRefused))

    with EvaluationProgress(len(by_id), "the student alone", "problems") as progress:
        solutions_of_problems = await gather_or_stop(map(solve, by_id.values()))
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


# The pedagogical reward model --------------------------------------------------------------------------------------


def check_scorer(config: EvalConfig) -> None:
    """Check the reward model and its prompt, before hours are spent on conversations.

    Raises:
        ConfigError: if the model cannot be loaded, or has fewer positions than `pedagogical_reward_vllm.max_length`.
        DataError: if the prompt cannot be rendered.
    """
    from transformers import AutoConfig

    name, length = config.pedagogical_reward_model, config.pedagogical_reward_vllm.max_length
    try:
        check_model("pedagogical_reward_model", name)
    except ConfigError as error:
        raise ConfigError(f"{error} Without this measurement: score_using_pedagogical_reward=false.") from error
    load_tokenizer("pedagogical_reward_model", name)
    render(config.pedagogical_reward_prompt_path)
    positions = getattr(AutoConfig.from_pretrained(name, trust_remote_code=False), "max_position_embeddings", length)
    if length > positions:
        raise ConfigError(
            f"pedagogical_reward_vllm.max_length is {length}, but {name} reads {positions} tokens at most: lower it."
        )


async def score_messages(config: EvalConfig, records: Sequence[ConversationRecord]) -> list[list[float]]:
    """Score each teacher message of each conversation, in order; errors as in `score_dialogues`."""
    instruction = render(config.pedagogical_reward_prompt_path)
    dialogues = [scored_dialogues(record, instruction) for record in records]
    scores = iter(await score_dialogues(config, [dialogue for group in dialogues for dialogue in group]))
    return [[next(scores) for _ in group] for group in dialogues]


async def score_dialogues(config: EvalConfig, dialogues: Sequence[list[Message]]) -> list[float]:
    """Score the last message of each dialogue, given those before it. A score is the model's unbounded logit. The
    engine is started for this call and shut down afterwards.

    Raises:
        EngineFailure: if the model cannot be loaded, or its engine dies.
        DataError: if a dialogue is too long for the model.
    """
    from classroom_rl.engines.vllm.reward_engine import RewardEngine

    model = ModelConfig(config.pedagogical_reward_model, config.pedagogical_reward_vllm)
    engine = await RewardEngine.start(model, config.seed, config.generation)
    slots = asyncio.Semaphore(model.vllm.max_num_seqs)

    async def score(dialogue: list[Message]) -> float:
        async with slots:
            result = await engine.score(dialogue)
        progress.add(1)
        return result

    try:
        with EvaluationProgress(len(dialogues), "pedagogical reward", "messages") as progress:
            return await asyncio.gather(*map(score, dialogues))
    finally:
        engine.shutdown()


def scored_dialogues(record: ConversationRecord, instruction: str) -> list[list[Message]]:
    """The dialogues that the reward model scores: one for each message that the teacher wrote itself, ending with that
    message.

    A dialogue holds the instruction, the problem (with an empty reference solution, because tutors get none), the
    student as user, and the teacher as assistant. Thoughts and the end-of-conversation mark are removed.
    """
    messages = [
        {"role": "system", "content": instruction},
        {"role": "user", "content": f"Problem: {record.problem}\nReference Solution: "},
    ]
    dialogues = []
    for turn in record.turns:
        text = visible_text(turn.text).replace(END_OF_CONVERSATION, "").strip()
        messages.append({"role": "assistant" if turn.role == "teacher" else "user", "content": text})
        if turn.role == "teacher" and not turn.given:
            dialogues.append(list(messages))
    return dialogues
