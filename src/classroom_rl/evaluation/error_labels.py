"""Labels of the student's errors by the judge's model, for lessons whose errors no rule can find.

The model is shown the lesson plan and the conversation, not the personas. Labels enter no reward, and figures that use
them say so.
"""

import asyncio
import logging
from collections.abc import Sequence

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.engines.api.chat_api import ChatRequest
from classroom_rl.environments.classroom.conversation import State
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Seats
from classroom_rl.errors import JudgeOutputError, RequestRefused
from classroom_rl.evaluation.metrics.language import ErrorLabels
from classroom_rl.judges.json_answer import find_object
from classroom_rl.judges.model_judge import KeptReplies, render_rule, wanted_schema
from classroom_rl.judges.plans import read_plan
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.scheduler import Schedule
from classroom_rl.rollout.thoughts import visible_messages

logger = logging.getLogger(__name__)

SCHEMA = {
    "type": "object",
    "properties": {"reasoning": {"type": "string"}, "errors": {"type": "array", "items": {"type": "integer"}}},
    "required": ["reasoning", "errors"],
    "additionalProperties": False,
}


async def label_errors(
    config: EvalConfig, seats: Seats, schedule: Schedule, records: Sequence[ConversationRecord]
) -> ErrorLabels | None:
    """Ask the judge's model for labels of all conversations that the rules cannot read.

    Returns:
        None without such conversations, without `student_errors_prompt_path`, or if the judge is not a model. A
        conversation whose answer cannot be parsed has no labels.

    Raises:
        EngineFailure, ProviderFailure: if the judge cannot be asked at all.
    """
    open_ones = [record for record in records if read_plan(record.problem).lesson is None]
    asked = config.student_errors_prompt_path is not None and ("judge" in seats.apis or "judge" in seats.engines)
    if not open_ones or not asked:
        return None
    with schedule.register(1) as registration:
        await registration.wait_for_phase(State.JUDGE_TURN)  # a judge on an engine is awake only then
        found = await asyncio.gather(*(_label(config, seats, record) for record in open_ones))
    return {label: error for labels in found for label, error in labels.items()}


async def _label(config: EvalConfig, seats: Seats, record: ConversationRecord) -> ErrorLabels:
    conversation = visible_messages(record.turns)
    messages = render_rule(config.student_errors_prompt_path, conversation, record.problem)
    try:
        return read_labels(record, await _ask(config, seats, messages))
    except (JudgeOutputError, RequestRefused) as error:
        logger.warning("the student's errors in %s are not labelled: %s", record.id, error)
        return {}


async def _ask(config: EvalConfig, seats: Seats, messages: list[dict[str, str]]) -> str:
    judge, most = config.judge_model, config.generation.max_tokens_per_judge_attempt
    schema = wanted_schema(judge, SCHEMA)
    if "judge" not in seats.apis:
        sampling = Sampling(0.0, judge.vllm.top_p, judge.vllm.top_k, most, schema=schema)
        return (await seats.engines["judge"].chat(messages, sampling)).text
    api = seats.apis["judge"]
    request = ChatRequest(messages, Sampling(0.0, max_tokens=most), schema, ("errors",))
    return (await KeptReplies(judge, api.ledger, api).get(request))[0].text


def read_labels(record: ConversationRecord, answer: str) -> ErrorLabels:
    """Parse the labels in a judge's answer.

    Raises:
        JudgeOutputError: if the answer has no list `errors`, or names a message that is not the student's.
    """
    numbers = find_object(answer).get("errors")
    places = [place for place, turn in enumerate(record.turns) if turn.role == "student"]
    if not isinstance(numbers, list) or not all(type(number) is int and number - 1 in places for number in numbers):
        raise JudgeOutputError(
            f"errors is {numbers!r}; it must be a list of numbers of the student's messages, which are "
            f"{[place + 1 for place in places]}: {answer[:300]!r}"
        )
    return {(record.id, place): place + 1 in numbers for place in places}
