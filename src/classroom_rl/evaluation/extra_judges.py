"""Asks models about finished conversations: scores by further judges with their agreement, and labels of the student's
errors in lessons whose errors no rule can find.

The model sees the lesson plan and the conversation, not the personas. Labels are not used in any reward, and figures
that use them say so.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.engines.api.chat_api import ChatRequest
from classroom_rl.environments.classroom.conversation import State
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.errors import ContextOverflow, JudgeOutputError, RequestRefused
from classroom_rl.evaluation.metrics.language import ErrorLabels
from classroom_rl.judges.agreement import krippendorff_alpha, rank_correlation
from classroom_rl.judges.json_answer import find_object
from classroom_rl.judges.messages import read_plan
from classroom_rl.judges.model_judge import render_rule, wanted_schema
from classroom_rl.judges.verdicts import ask_for_verdict, sum_up
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.statistics import judgement_of
from classroom_rl.rollout.engine import ConversationFacts, Judge, Sampling
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.scheduler import Schedule
from classroom_rl.rollout.thoughts import visible_messages
from classroom_rl.server.open_models import open_second_judge, replies_of

logger = logging.getLogger(__name__)


SCHEMA = {
    "type": "object",
    "properties": {"reasoning": {"type": "string"}, "errors": {"type": "array", "items": {"type": "integer"}}},
    "required": ["reasoning", "errors"],
    "additionalProperties": False,
}


async def label_errors(
    config: EvalConfig, roles: Roles, schedule: Schedule, records: Sequence[ConversationRecord]
) -> ErrorLabels | None:
    """Ask the judge's model to label all conversations whose errors the rules cannot find.

    Returns:
        The labels; None without such conversations, without `student_errors_prompt_path`, or if the judge is not a
        model. A conversation whose answer cannot be parsed has no labels.

    Raises:
        EngineFailure, ProviderFailure: if the judge cannot be asked at all.
    """
    without_rules = [record for record in records if read_plan(record.problem).lesson is None]
    can_ask = config.student_errors_prompt_path is not None and ("judge" in roles.apis or "judge" in roles.engines)
    if not without_rules or not can_ask:
        return None
    with schedule.register(1) as registration:
        await registration.wait_for_phase(State.JUDGE_TURN)  # a judge on an engine is awake only then
        labels_of_records = await asyncio.gather(*(_label(config, roles, record) for record in without_rules))
    return {label: error for labels in labels_of_records for label, error in labels.items()}


async def _label(config: EvalConfig, roles: Roles, record: ConversationRecord) -> ErrorLabels:
    conversation = visible_messages(record.turns)
    messages = render_rule(config.student_errors_prompt_path, conversation, record.problem)
    try:
        return read_labels(record, await _ask(config, roles, messages))
    except (ContextOverflow, JudgeOutputError, RequestRefused) as error:
        logger.warning("the student's errors in %s are not labelled: %s", record.id, error)
        return {}


async def _ask(config: EvalConfig, roles: Roles, messages: list[dict[str, str]]) -> str:
    sampling = Sampling(0.0, max_tokens=config.generation.max_tokens_per_judge_attempt)
    request = ChatRequest(messages, sampling, wanted_schema(config.judge_model, SCHEMA), ("errors",))
    answer, _ = await replies_of("judge", config.judge_model, roles.engines, roles.apis).get(request)
    return answer.text


def read_labels(record: ConversationRecord, answer: str) -> ErrorLabels:
    """Parse the labels in a judge's answer. Raises `JudgeOutputError` if the answer has no list `errors`, or names a
    message that is not the student's."""
    numbers = find_object(answer).get("errors")
    positions = [position for position, turn in enumerate(record.turns) if turn.role == "student"]
    if not isinstance(numbers, list) or not all(type(number) is int and number - 1 in positions for number in numbers):
        raise JudgeOutputError(
            f"errors is {numbers!r}; it must be a list of numbers of the student's messages, which are "
            f"{[position + 1 for position in positions]}: {answer[:300]!r}"
        )
    return {(record.id, position): position + 1 in numbers for position in positions}


SpendingByJudge = dict[str, dict[str, float]]
"""Judge → its tokens and dollars, as the fields of `Spending`."""

JudgeScores = dict[str, dict[str, Optional[float]]]
"""Judge → conversation (its `conversation_key`) → the judge's score in [0, 1]; None without a verdict."""


def conversation_key(tutor: str, record: ConversationRecord) -> str:
    """The name of a conversation, unique across tutors."""
    return f"{tutor}/{record.id}"


async def ask_extra_judges(
    config: EvalConfig, records: Mapping[str, Sequence[ConversationRecord]], folder: Path
) -> tuple[JudgeScores, SpendingByJudge]:
    """Have each of `extra_judges` judge every tutor's conversations once, by the configured judge's rules. Returns the
    scores, and the spending of the judges behind an API. Raises `ProviderFailure` if a judge cannot be asked at all."""
    extra_scores: JudgeScores = {}
    spending: SpendingByJudge = {}
    for number, judge in enumerate(config.extra_judges):
        ledger_path = folder / f"extra_judge_{number}_calls.sqlite"
        role, api = open_second_judge(judge, config.generation, ledger_path, "extra judge")
        try:
            keys = [conversation_key(tutor, record) for tutor, group in records.items() for record in group]
            requests = (_score(role, config, record) for group in records.values() for record in group)
            extra_scores[judge.model_name_or_path] = dict(zip(keys, await asyncio.gather(*requests), strict=True))
        finally:
            if api is not None:
                spending[judge.model_name_or_path] = asdict(api.ledger.spending())
                api.ledger.close()
    return extra_scores, spending


async def _score(judge: Judge, config: EvalConfig, record: ConversationRecord) -> Optional[float]:
    rules = list(config.generation.judges_rules_prompts_paths)
    facts = ConversationFacts(tuple(turn.persona for turn in record.turns), record.max_turns, record.answer)
    conversation_and_problem = (visible_messages(record.turns), record.problem)
    verdicts = await asyncio.gather(
        *(ask_for_verdict(judge, rule, 0, conversation_and_problem, facts) for rule in rules)
    )
    judgement = sum_up(verdicts, rules)
    return None if judgement is None else judgement.score


def summarise_judges(
    name: str, records: Mapping[str, Sequence[ConversationRecord]], extra_scores: JudgeScores
) -> dict[str, Any]:
    """Summarise the scores of several judges on each tutor's conversations of one sampling, for metrics.json. `name` is
    the judge that the rewards come from.

    Returns:
        `scores`: judge → tutor → estimate of the score in [0, 1], without penalties and the reward's other parts;
        `spearman`: the rank correlation of each extra judge with the first judge, over the `pairs` conversations that
        both scored; `krippendorff_alpha` of all judges, over the `n` conversations with at least two scores.
    """
    first_scores = {
        conversation_key(tutor, record): None if (judgement := judgement_of(record)) is None else judgement.score
        for tutor, group in records.items()
        for record in group
    }
    judges: JudgeScores = {name: first_scores}
    for judge, scores in extra_scores.items():  # an extra judge may be the same model as the first
        judges[judge if judge not in judges else f"{judge} (again)"] = {key: scores[key] for key in first_scores}
    pairs = {
        judge: [
            (first_scores[key], scores[key]) for key in first_scores if None not in (first_scores[key], scores[key])
        ]
        for judge, scores in judges.items()
        if judge != name
    }
    units = [[scores[key] for scores in judges.values()] for key in first_scores]
    return {
        "scores": {
            judge: {tutor: _estimate(tutor, group, scores) for tutor, group in records.items()}
            for judge, scores in judges.items()
        },
        "spearman": {judge: rank_correlation(score_pairs) for judge, score_pairs in pairs.items()},
        "pairs": {judge: len(score_pairs) for judge, score_pairs in pairs.items()},
        "krippendorff_alpha": krippendorff_alpha(units),
        "n": sum(len(unit) - unit.count(None) > 1 for unit in units),
    }


def _estimate(
    tutor: str, records: Sequence[ConversationRecord], scores: Mapping[str, Optional[float]]
) -> dict[str, Any]:
    by_lesson = {
        lesson: [score for record in group if (score := scores[conversation_key(tutor, record)]) is not None]
        for lesson, group in group_by_problem(records).items()
    }
    return mean_with_ci(by_lesson)
