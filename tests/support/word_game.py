"""A whole environment in one file: the policy asks a tool for a secret word, and says it."""

from collections.abc import Sequence

from classroom_rl.config.base import EnvironmentConfig as Generation
from classroom_rl.rollout.dialogue import DialogueEnvironment, DialogueEpisode
from classroom_rl.rollout.problem import Problem

REWARD_NAMES = ("said",)
TURN_REWARD_NAMES = ("calls",)
__all__ = ["REWARD_NAMES", "TURN_REWARD_NAMES", "Environment", "Generation", "default_weights"]


def default_weights(generation: Generation) -> dict[str, float]:
    """To say the word is all that counts."""
    return {"said": 1.0}


def secret(number: int) -> str:
    """Tells the secret word.

    Args:
        number: which word
    """
    return ["apple", "pear"][number]


class Environment(DialogueEnvironment):
    """A problem's answer is the word. It is asked for until it was said."""

    tools = (secret,)

    @classmethod
    def first_messages(cls, problem: Problem, generation: Generation) -> list[dict[str, str]]:
        return [{"role": "system", "content": problem.text}]

    def reply(self, episode: DialogueEpisode) -> str | None:
        return None if episode.problem.answer in episode.messages[-1] else "No."

    def reward(self, name: str, episode: DialogueEpisode) -> float:
        return float(episode.problem.answer in episode.messages[-1])

    def turn_rewards(self, name: str, episode: DialogueEpisode) -> Sequence[float | None]:
        return [float(len(turn.tool_calls)) for turn in episode.turns if turn.role == "teacher"]


def quickness(episode: DialogueEpisode) -> float:
    """A reward besides the environment's own: 1 for an episode of one message, less for more."""
    return 1 / len(episode.messages)


def words_of_messages(episode: DialogueEpisode) -> list[float]:
    """A turn reward besides the environment's own: the words of each message."""
    return [float(len(message.split())) for message in episode.messages]
