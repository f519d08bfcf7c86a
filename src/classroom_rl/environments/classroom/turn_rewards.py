"""The turn rewards: pure functions of a finished conversation that give each message of the teacher a value.

Each returns one number for every teacher message, in order, or None for a message that it cannot score. To add one,
write a function and name it in `TURN_REWARDS`; `train.turn_credit.rewards` gives it a weight. How a message's tokens
are credited with it: trainer/turn_advantages.py and docs/supervision.md.
"""

from collections.abc import Callable
from statistics import fmean

from classroom_rl.config.values import SUPERVISOR_REWARD
from classroom_rl.environments.classroom.conversation import Conversation

TurnReward = Callable[[Conversation], list[float | None]]


def supervisor(conversation: Conversation) -> list[float | None]:
    """The supervisor's penalty of each message: 0 for a valid one, below 0 for an invalid one."""
    return [turn.review.penalty if turn.review is not None else None for turn in conversation.teacher_turns]


def judge(conversation: Conversation) -> list[float | None]:
    """The judge's findings on each message in [0, 1], averaged over the attempts that gave some. The embedded rubric
    gives them; a judge model need not. A judge also scores a message from the prompt template, which does not count."""
    counted = [verdict for verdict in conversation.verdicts if not verdict.anchor]
    found = [verdict.turn_scores for verdict in counted if verdict.turn_scores is not None]
    heard = [turn for turn in conversation.turns if turn.role == "teacher"]
    places = [place for place, turn in enumerate(heard) if not turn.given]
    known = [[scores[place] for scores in found if place < len(scores)] for place in places]
    known = [[value for value in values if value is not None] for values in known]
    return [fmean(values) if values else None for values in known]


def length(conversation: Conversation) -> list[float | None]:
    """−0.5 for a message that reaches `max_tokens_per_turn` − 1 tokens, otherwise 0."""
    most = conversation.rules.max_tokens_per_turn - 1
    return [-0.5 if turn.tokens >= most else 0.0 for turn in conversation.teacher_turns]


TURN_REWARDS: dict[str, TurnReward] = {SUPERVISOR_REWARD: supervisor, "judge": judge, "length": length}
