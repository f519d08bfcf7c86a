"""The configuration of the environment in which a user's own program, the agent, plays the policy."""

from typing import Annotated, Any

from classroom_rl.config.base import EnvironmentConfig
from classroom_rl.config.fields import Seconds, Text, Whole, between, config_group
from classroom_rl.config.values import PPO
from classroom_rl.errors import ConfigError
from classroom_rl.system.functions import function_of

POSTED = "posted"
"""The only reward: the number that the agent returned or posted."""
REWARD_NAMES = (POSTED,)


@config_group
class Generation(EnvironmentConfig):
    """The `generation` block of agents: programs that talk to the policy through an OpenAI-compatible URL of the
    server, one for each episode, and give it a reward, which ends the episode. Of an agent's calls, `max_turns` counts
    the answers and the messages between them."""

    agent: Text | None = None
    """A function `module:name` of your own that plays an episode, in a thread of the server: `play(base_url, api_key,
    problem)` returns the reward (or posts it), and may be async. Null: programs elsewhere take the episodes with `POST
    /agent/next`, and post the rewards."""
    agent_timeout_s: Seconds = 600.0
    """How long an agent may take for an episode, in seconds. Later it has failed, and its episode is not trained on."""
    agents_at_once: Annotated[Whole, between(1, 1000)] = 64
    """How many episodes are with agents at a time; the others of a batch wait."""


def default_weights(generation: Generation) -> dict[str, float]:
    """The agent's reward is the episode's."""
    return {POSTED: 1.0}


def check(config: Any) -> None:
    """Import the agent, and refuse PPO.

    Raises:
        ConfigError: if there is no such function, or for `train.algorithm=ppo`.
    """
    if config.generation.agent is not None:
        function_of("generation.agent", config.generation.agent, ("null",))
    if config.train.algorithm == PPO:
        raise ConfigError(
            "train.algorithm is ppo, whose advantages run from each message to the next one in its training samples. "
            "An agent may go back to an earlier prompt, so its messages do not stand there in order: take grpo."
        )
