"""Which of a student's messages hold an error, where no rule can tell: the judge's model labels them.

It is shown the plan and the lesson, not the personas. These labels enter no reward; figures that rest on them say so.
"""

import asyncio
import logging
from collections.abc import Sequence

from config.eval_model import EvalConfig
from src.classroom.conversation import State, visible_text
from src.classroom.record import ConversationRecord
from src.classroom.seats import Seats
from src.classroom.verdicts import find_object
from src.errors import EngineFailure, JudgeOutputError, ProviderFailure, RequestRefused
from src.inference_providers.chat_api import ChatRequest
from src.inference_providers.open_router_inference import KeptReplies, render_rule
from src.message_rules.plans import read_plan
from src.rollout.engines import Sampling
from src.rollout.scheduler import Schedule

logger = logging.getLogger(__name__)

Labels = dict[tuple[str, int], bool]
"""(conversation id, position of a student's turn) → whether it holds an error."""

SCHEMA = {
    "type": "object",
    "properties": {"reasoning": {"type": "string"}, "errors": {"type": "array", "items": {"type": "integer"}}},
    "required": ["reasoning", "errors"],
    "additionalProperties": False,
}


async def label_errors(
    config: EvalConfig, seats: Seats, schedule: Schedule, records: Sequence[ConversationRecord]
) -> Labels | None:
    """The labels of all conversations whose language no rule reads; None without `student_errors_prompt_path` or
    without a model as the judge. A conversation without a readable answer has no labels.

    Raises:
        EngineFailure, ProviderFailure: if the judge cannot be asked at all.
    """
    open_ones = [record for record in records if read_plan(record.problem).lesson is None]
    asked = config.student_errors_prompt_path is not None and ("judge" in seats.apis or "judge" in seats.engines)
    if not open_ones or not asked:
        return None
    with schedule.register(1) as registration:
        await registration.wait_for_phase(State.JUDGE_TURN)  # where a judge on an engine is awake
        found = await asyncio.gather(*(_label(config, seats, record) for record in open_ones))
    return {label: error for labels in found for label, error in labels.items()}


async def _label(config: EvalConfig, seats: Seats, record: ConversationRecord) -> Labels:
    conversation = [{"role": turn.role, "content": visible_text(turn.text)} for turn in record.turns]
    messages = render_rule(config.student_errors_prompt_path, conversation, record.problem)
    try:
        return read_labels(record, await _ask(config, seats, messages))
    except (EngineFailure, ProviderFailure):
        raise
    except (JudgeOutputError, RequestRefused) as error:
        logger.warning("the student's errors in %s are not labelled: %s", record.id, error)
        return {}


async def _ask(config: EvalConfig, seats: Seats, messages: list[dict[str, str]]) -> str:
    judge, most = config.judge_model, config.generation.max_tokens_per_judge_attempt
    if "judge" not in seats.apis:
        options = judge.vllm
        return (await seats.engines["judge"].chat(messages, Sampling(0.0, options.top_p, options.top_k, most))).text
    api = seats.apis["judge"]
    schema = None if judge.response_format == "text" else SCHEMA
    request = ChatRequest(messages, Sampling(0.0, max_tokens=most), schema, ("errors",))
    return (await KeptReplies(judge, api.ledger, api).get(request))[0].text


def read_labels(record: ConversationRecord, answer: str) -> Labels:
    """The labels in a judge's answer.

    Raises:
        JudgeOutputError: if it names no list of errors, or a message that is none of the student's.
    """
    numbers = find_object(answer).get("errors")
    places = [place for place, turn in enumerate(record.turns) if turn.role == "student"]
    if not isinstance(numbers, list) or not all(type(number) is int and number - 1 in places for number in numbers):
        raise JudgeOutputError(
            f"errors is {numbers!r}; it must be a list of numbers of the student's messages, which are "
            f"{[place + 1 for place in places]}: {answer[:300]!r}"
        )
    return {(record.id, place): place + 1 in numbers for place in places}
