"""Rules that span several config keys, and what follows from a configuration without being written in it."""

from config.base import GenerationConfig, VllmConfig
from config.train_rl_model import TrainRLConfig
from src.errors import ConfigError
from src.judging import SCORING_RULES
from src.rewards import REWARDS, default_weights

CONVERSATION_TYPES = ("guided", "attempt")


def reward_weights(config: TrainRLConfig) -> dict[str, float]:
    """The rewards that are computed and their weights: as configured, else as the judge rules imply."""
    configured = config.train.reward_weights
    if configured is not None:
        return dict(configured)
    return default_weights(tuple(config.generation.judges_rules_prompts_paths), SCORING_RULES)


def solutions_are_graded(config: TrainRLConfig) -> bool:
    """Whether something grades the solutions that a student writes after the dialogue."""
    return config.reward_model.model_name_or_path == "Answer"


def check_train_rl(config: TrainRLConfig) -> None:
    """The rules for server and trainer.

    Raises:
        ConfigError: with the values, the rule and the fix.
    """
    check_generation(config.generation)
    check_sampling("teacher_model", config.teacher_model.vllm)
    _check_batch(config)
    if config.huggingface.push_to_hub and not config.huggingface.name:
        raise ConfigError(
            "huggingface.push_to_hub is true, but huggingface.name is null: name the repository, user/name."
        )
    _check_rewards(config)
    if config.teacher_model.vllm.temperature <= 0:
        raise ConfigError(
            "teacher_model.vllm.temperature is 0: every conversation of a group would be the same and GRPO would learn "
            "nothing. Set it above 0, usually to 1.0."
        )


def check_generation(generation: GenerationConfig) -> None:
    """The classroom's own rules."""
    if generation.max_turns < 1:
        raise ConfigError(f"generation.max_turns is {generation.max_turns}; it counts messages and must be at least 1.")
    _check_error_rate(generation)
    if not generation.student_personas_prompts_paths:
        raise ConfigError(
            "generation.student_personas_prompts_paths names no persona: give at least one, for example "
            "{simple_student: prompt_templates/personas/simple_student.txt}."
        )
    forced = generation.forced_conversation_type
    if forced is not None and forced.lower() not in CONVERSATION_TYPES:
        raise ConfigError(
            f"generation.forced_conversation_type is {forced}; it is one of {', '.join(CONVERSATION_TYPES)} or null."
        )
    if (forced is None or forced.lower() == "attempt") and generation.student_initial_attempt_prompt_path is None:
        raise ConfigError(
            "Conversations may open with the student's attempt, which needs "
            "generation.student_initial_attempt_prompt_path. Set it, or set generation.forced_conversation_type=guided."
        )


def _check_error_rate(generation: GenerationConfig) -> None:
    rate, personas = generation.student_error_rate, set(generation.student_personas_prompts_paths)
    if isinstance(rate, dict):
        weights = list(rate.values())
        if set(rate) != personas or not all(_is_number(w) and w >= 0 for w in weights) or sum(weights) <= 0:
            raise ConfigError(
                f"generation.student_error_rate is {rate}; as a mapping it gives each persona of "
                f"generation.student_personas_prompts_paths ({', '.join(sorted(personas))}) a weight from 0, not all 0."
            )
    elif not _is_number(rate) or not 0 <= rate <= 1:
        raise ConfigError(
            f"generation.student_error_rate is {rate!r}; it is a share from 0 to 1, or a mapping from every persona to "
            "its weight."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_sampling(name: str, options: VllmConfig) -> None:
    """Sampling values that vLLM would refuse, or that mean something else than they seem to."""
    if not 0 < options.top_p <= 1:
        raise ConfigError(f"{name}.vllm.top_p is {options.top_p}; it is above 0 and at most 1.")
    if options.top_k != -1 and options.top_k < 1:
        raise ConfigError(f"{name}.vllm.top_k is {options.top_k}; it is at least 1, or -1 for no limit.")


def _check_batch(config: TrainRLConfig) -> None:
    train = config.train
    if train.num_samples_per_problem < 2:
        raise ConfigError(
            f"train.num_samples_per_problem is {train.num_samples_per_problem}; GRPO compares the conversations of a "
            "group and needs at least 2."
        )
    if config.logging.save_steps < 1:
        raise ConfigError(
            f"logging.save_steps is {config.logging.save_steps}; a run is saved every so many steps, from 1."
        )
    batch = train.number_of_problems_per_batch * train.num_samples_per_problem
    if batch < 1 or batch % train.per_device_train_batch_size:
        raise ConfigError(
            "train.number_of_problems_per_batch × train.num_samples_per_problem "
            f"({train.number_of_problems_per_batch} × {train.num_samples_per_problem} = {batch}) must be divisible by "
            f"train.per_device_train_batch_size ({train.per_device_train_batch_size})."
        )


def _check_rewards(config: TrainRLConfig) -> None:
    weights = reward_weights(config)
    unknown = sorted(set(weights) - set(REWARDS))
    if unknown or not weights:
        raise ConfigError(
            f"train.reward_weights names {', '.join(unknown) or 'no reward'}; there are: {', '.join(REWARDS)}."
        )
    scored = SCORING_RULES & set(config.generation.judges_rules_prompts_paths)
    if "pedagogical" in weights and (not scored or config.generation.number_judge_attempts < 1):
        raise ConfigError(
            "The pedagogical reward needs a judge rule that scores: name pedagogical_eval in "
            "generation.judges_rules_prompts_paths and set generation.number_judge_attempts to at least 1."
        )
    if "end_rm" in weights and not (
        solutions_are_graded(config)
        and config.generation.number_student_attempts > 0
        and config.generation.student_final_prompt_path
    ):
        raise ConfigError(
            "The end_rm reward needs graded solutions: set reward_model.model_name_or_path=Answer, "
            "generation.number_student_attempts above 0 and generation.student_final_prompt_path, or leave end_rm out "
            "of train.reward_weights."
        )
