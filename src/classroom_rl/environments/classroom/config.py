"""The classroom's part of a configuration: its `generation` block, its rewards' names and default weights, its checks,
the rules of a conversation that follow from it, and what the page shows of a run.

The dataclasses and checks are defined in `classroom_rl/config/`, together with those of the programs.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from classroom_rl.config.base import GenerationConfig as Generation
from classroom_rl.config.checks import check_classroom_rewards, check_generation
from classroom_rl.config.rubric import load_rubric
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import ERROR_PERSONA, SCORING_RULES, STUDENT_REWARD, TRAINS_STUDENT
from classroom_rl.environments.classroom.conversation import ClassroomRules
from classroom_rl.environments.classroom.record import PEDAGOGICAL
from classroom_rl.environments.classroom.rewards import REWARDS, TURN_REWARDS
from classroom_rl.environments.classroom.role_checks import check_trained_role
from classroom_rl.environments.classroom.setup import ConversationType, SetupOptions, persona_weights
from classroom_rl.environments.classroom.teacher import informed_prompt
from classroom_rl.judges.difficulty import LevelRules
from classroom_rl.judges.verdicts import CRITERIA
from classroom_rl.rollout.extensions import MetricPanel, RunView

__all__ = [
    "HAS_SUPERVISOR",
    "REWARD_NAMES",
    "RUN_VIEW",
    "TURN_REWARD_NAMES",
    "Generation",
    "check",
    "classroom_rules",
    "criterion_weights",
    "default_weights",
    "error_share",
    "rows_per_episode",
    "informed_prompt",
    "setup_options",
]

HAS_SUPERVISOR = True
"""Whether a supervisor can review the policy's messages in this environment."""

REWARD_NAMES, TURN_REWARD_NAMES = tuple(REWARDS), tuple(TURN_REWARDS)
MATHS_REWARDS = ("end_rm", "thinking", "end_of_conversation", "length")


def default_weights(generation: Generation) -> dict[str, float]:
    """The rewards that the judge rules imply, each with weight 1; of a student under training its own, and
    with weight 0 the tutor's score, for `trainer/pleasing.py`."""
    if generation.trained_role == TRAINS_STUDENT:
        return {STUDENT_REWARD: 1.0} | ({PEDAGOGICAL: 0.0} if SCORING_RULES & set(generation.judge_rules) else {})
    scoring_rules = SCORING_RULES & set(generation.judges_rules_prompts_paths)
    return dict.fromkeys((PEDAGOGICAL,) if scoring_rules else MATHS_REWARDS, 1.0)


def criterion_weights(config: TrainRLConfig) -> dict[str, float]:
    """The weights of a record's `criteria`: those of the rewards, that of the pedagogical one divided among the
    criteria of the judge's scores."""
    weights, judge = reward_weights(config), config.judge_model
    pedagogical_weight = weights.pop(PEDAGOGICAL, 0.0)
    if judge.rubric is None:
        shares = {key: criterion.weight for key, criterion in CRITERIA.items()}
    else:
        rubric = load_rubric(judge.rubric)
        positive_weight = sum(criterion.weight for criterion in rubric if criterion.weight > 0)
        shares = {criterion.key: criterion.weight / positive_weight for criterion in rubric}
    return weights | {f"{PEDAGOGICAL}/{key}": pedagogical_weight * share for key, share in shares.items()}


def check(config: TrainRLConfig) -> None:
    """Check the classroom's keys of a training configuration.

    Raises:
        ConfigError: if one is invalid; the message gives the values, the rule and the fix.
    """
    check_generation(config.generation)
    check_trained_role(config, reward_weights(config))
    check_classroom_rewards("train.reward_weights", reward_weights(config), config.generation, config.reward_model)


def rows_per_episode(generation: Generation) -> int | None:
    """The most messages of a student under training, each of which is one training sample; None for a teacher, whose
    conversation is one."""
    return generation.max_turns // 2 + 1 if generation.trained_role == TRAINS_STUDENT else None


def classroom_rules(
    generation: Generation, reward_weights: Mapping[str, float], teacher_context: int, graded: bool
) -> ClassroomRules:
    """The rules of all conversations under a configuration.

    Args:
        teacher_context: the context length of the teacher's model, in tokens. A conversation is limited by this and by
            `max_tokens_in_conversation`.
        graded: whether solutions are graded. If not, or if no reward uses solutions, none are written.
    """
    return ClassroomRules(
        max_turns=generation.max_turns,
        max_tokens_in_conversation=min(generation.max_tokens_in_conversation, teacher_context),
        max_tokens_per_turn=generation.max_tokens_per_turn,
        judge_rules=tuple(generation.judge_rules),
        solutions=generation.number_student_attempts if graded and "end_rm" in reward_weights else 0,
        ignore_rejected_judge=generation.ignore_rejected_judge,
        extra_penalty_for_rejected_judges=generation.extra_penalty_for_rejected_judges,
        low_score_threshold=generation.low_score_threshold,
        use_thinking=generation.use_thinking or generation.force_thinking,
        post_test=generation.post_test.scored_by if generation.post_test.enable else "",
        ledger_caps_pedagogical=generation.post_test.enable and generation.post_test.caps_pedagogical,
        level=LevelRules(**asdict(generation.level)),
    )


def setup_options(generation: Generation) -> SetupOptions:
    """The options that `draw_setup` draws from under this configuration."""
    forced = generation.forced_conversation_type
    personas = list(generation.student_personas_prompts_paths)
    return SetupOptions(
        types=tuple(ConversationType) if forced is None else (ConversationType(forced.lower()),),
        student_names=tuple(generation.student_names) or (None,),
        persona_weights=persona_weights(personas, generation.student_error_rate),
        student_turns=generation.max_turns // 2 + 2,  # an upper bound on the student's turns
    )


def error_share(config: Mapping[str, Any]) -> float | None:
    """Return the share of the student's messages that should contain an error, from a recorded configuration; None if
    it is unknown or no persona makes errors."""
    generation = config.get("generation") or {}
    rate, personas = generation.get("student_error_rate"), generation.get("student_personas_prompts_paths")
    if isinstance(personas, Mapping) and ERROR_PERSONA not in personas:
        return None
    if isinstance(rate, Mapping):
        total = sum(rate.values())
        return rate.get(ERROR_PERSONA, 0) / total if total else None
    return None if rate is None else float(rate)


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    generation = config.get("generation") or {}
    return {"tutor closes from message": generation.get("max_turns"), "error turns": error_share(config)}


def _personas(config: Mapping[str, Any]) -> list[str]:
    return list((config.get("generation") or {}).get("student_personas_prompts_paths") or {})


_LEVEL_PANEL = MetricPanel(
    "Messages at the lesson's level",
    "score, 0 to 1, mean of messages",
    (
        ("level/first_half", "first half of a conversation", "blue"),
        ("level/second_half", "second half", "orange"),
    ),
)
RUN_VIEW = RunView(live_tab="chat", facts=_facts, personas=_personas, panels=(_LEVEL_PANEL,))
