"""Bringing a conversation back to where the journal leaves it, so that nothing in it is played or judged twice."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from src.classroom.conversation import Conversation, Solution
from src.classroom.verdicts import Verdict
from src.rollout.replay import add_tokens
from src.rollout.tokens import Turn

_TURN, _VERDICT, _SOLUTIONS = TypeAdapter(Turn), TypeAdapter(Verdict), TypeAdapter(list[Solution])


@dataclass
class ReplayedState:
    """What the journal holds of a conversation beyond its turns.

    Attributes:
        verdicts: by (rule, attempt).
        solutions: None if they were not written yet.
        rewarded: whether its rewards are in the journal already.
        finished: whether its record is.
        failure: why it could not go on, if it could not.
    """

    verdicts: dict[tuple[str, int], Verdict] = field(default_factory=dict)
    solutions: list[Solution] | None = None
    rewarded: bool = False
    finished: bool = False
    failure: dict[str, Any] | None = None


def replay(conversation: Conversation, events: Iterable[dict[str, Any]], judge_again: bool) -> ReplayedState:
    """Add the turns among `events` to a conversation that has just started, and return what else they tell.

    Args:
        judge_again: leave out judge attempts that brought no verdict, and what a model refused to answer, so that they
            are made again.
    """
    replayed = ReplayedState()
    for event in events:
        if replayed.failure is not None and event["event"] in ("turn", "solutions"):  # it could go on later
            replayed.failure, replayed.rewarded, replayed.finished = None, False, False
        match event["event"]:
            case "turn":
                _add_turn(conversation, event)
            case "verdict":
                verdict = _VERDICT.validate_python(event["verdict"])
                replayed.verdicts[verdict.rule, verdict.attempt] = verdict
            case "solutions":
                replayed.solutions = _SOLUTIONS.validate_python(event["solutions"])
            case "grades":
                replayed.solutions = graded(replayed.solutions, event["grades"])
            case "cut_short":
                conversation.cut_short(event["reason"])
            case "failure":
                replayed.failure = event
            case "rewards":
                replayed.rewarded = True
            case "conversation":
                replayed.finished = True
    failed = [key for key, verdict in replayed.verdicts.items() if not verdict.valid]
    if judge_again and failed:
        for key in failed:
            del replayed.verdicts[key]
        replayed.rewarded = replayed.finished = False
    if replayed.failure is not None and judge_again:
        replayed.failure, replayed.rewarded, replayed.finished = None, False, False
    if replayed.failure is not None:
        order = conversation.rules.judge_rules.index
        conversation.verdicts = sorted(replayed.verdicts.values(), key=lambda each: (order(each.rule), each.attempt))
        known = (replayed.failure[name] for name in ("reason", "prompt_ids", "end_ids"))
        conversation.give_up(*known, overflow=replayed.failure.get("overflow", False))
    return replayed


def graded(solutions: Sequence[Solution], grades: Sequence[float]) -> list[Solution]:
    """The solutions with their grades."""
    return [replace(solution, grade=grade) for solution, grade in zip(solutions, grades, strict=True)]


def _add_turn(conversation: Conversation, event: dict[str, Any]) -> None:
    turn = _TURN.validate_python(event["turn"])
    if turn.role == "student":
        conversation.add_student_turn(turn, event["ids"])
        return
    if "prompt_ids" in event:
        conversation.open_buffer(event["prompt_ids"])
    if "prompt_estimate" in event:
        conversation.open_estimated(event["prompt_estimate"])
    if conversation.buffer is not None:
        add_tokens(conversation.buffer, event["ids"], event["logprobs"])
    conversation.add_teacher_turn(turn)
