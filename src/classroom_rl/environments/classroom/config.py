"""The classroom's part of a configuration: its `generation` block, its rewards' names and default weights, its checks.

The dataclasses and checks are defined in `classroom_rl/config/`, together with those of the programs.
"""

from classroom_rl.config.base import GenerationConfig as Generation
from classroom_rl.config.checks import check_classroom_rewards, check_generation
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import SCORING_RULES
from classroom_rl.environments.classroom.rewards import REWARDS, TURN_REWARDS

__all__ = ["HAS_SUPERVISOR", "REWARD_NAMES", "TURN_REWARD_NAMES", "Generation", "check", "default_weights"]

HAS_SUPERVISOR = True
"""Whether a supervisor can review the policy's messages in this environment."""

REWARD_NAMES, TURN_REWARD_NAMES = tuple(REWARDS), tuple(TURN_REWARDS)
MATHS_REWARDS = ("end_rm", "thinking", "end_of_conversation", "length")


def default_weights(generation: Generation) -> dict[str, float]:
    """The rewards that the judge rules imply, each with weight 1."""
    scoring_rules = SCORING_RULES & set(generation.judges_rules_prompts_paths)
    return dict.fromkeys(("pedagogical",) if scoring_rules else MATHS_REWARDS, 1.0)


def check(config: TrainRLConfig) -> None:
    """Check the classroom's keys of a training configuration.

    Raises:
        ConfigError: if one is invalid; the message gives the values, the rule and the fix.
    """
    check_generation(config.generation)
    check_classroom_rewards(config)
