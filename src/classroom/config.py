"""What a configuration may say of the classroom: the names of its rewards, and which of them count."""

from config.base import GenerationConfig
from config.values import SCORING_RULES
from src.classroom.rewards import REWARDS

REWARD_NAMES = tuple(REWARDS)
MATHS_REWARDS = ("end_rm", "thinking", "end_of_conversation", "length")


def default_weights(generation: GenerationConfig) -> dict[str, float]:
    """Which rewards a configuration's judge rules imply, each with weight 1."""
    scored = SCORING_RULES & set(generation.judges_rules_prompts_paths)
    return dict.fromkeys(("pedagogical",) if scored else MATHS_REWARDS, 1.0)
