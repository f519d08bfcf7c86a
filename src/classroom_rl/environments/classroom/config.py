"""The classroom's part of a configuration: its `generation` block, the names and default weights of its rewards,
checks.

The dataclasses and checks themselves are in `config/`, beside those of the programs.
"""

from classroom_rl.config.base import GenerationConfig as Generation
from classroom_rl.config.checks import check_classroom_rewards, check_generation
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import SCORING_RULES
from classroom_rl.environments.classroom.rewards import REWARDS, TURN_REWARDS

__all__ = ["HAS_SUPERVISOR", "REWARD_NAMES", "TURN_REWARD_NAMES", "Generation", "check", "default_weights"]

HAS_SUPERVISOR = True
"""Whether the environment asks a supervisor about the policy's messages."""

REWARD_NAMES, TURN_REWARD_NAMES = tuple(REWARDS), tuple(TURN_REWARDS)
MATHS_REWARDS = ("end_rm", "thinking", "end_of_conversation", "length")


def default_weights(generation: Generation) -> dict[str, float]:
    """The rewards that the judge rules imply, each with weight 1."""
    scored = SCORING_RULES & set(generation.judges_rules_prompts_paths)
    return dict.fromkeys(("pedagogical",) if scored else MATHS_REWARDS, 1.0)


def check(config: TrainRLConfig) -> None:
    """Check the classroom's keys of a training.

    Raises:
        ConfigError: with the values, the rule and the fix.
    """
    check_generation(config.generation)
    check_classroom_rewards(config)
