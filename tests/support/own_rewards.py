"""Rewards of one's own, as a configuration names them: `tests.support.own_rewards:brevity`."""

from classroom_rl.environments.classroom.conversation import Conversation

LONGEST = 100


def brevity(conversation: Conversation) -> float:
    """1 for messages of no characters, 0 for those of `LONGEST` or more."""
    longest = max(len(turn.text) for turn in conversation.teacher_turns)
    return max(0.0, 1 - longest / LONGEST)


def brevity_of_messages(conversation: Conversation) -> list[float | None]:
    """As `brevity`, for each message; the first one is not scored."""
    return [None, *(1 - len(turn.text) / LONGEST for turn in conversation.teacher_turns[1:])]


def of_first_message(conversation: Conversation) -> list[float]:
    """A value too few."""
    return [1.0]


def silent(conversation: Conversation) -> str:
    """No number."""
    return "short"


def broken(conversation: Conversation) -> float:
    """Fails."""
    raise KeyError("page")
