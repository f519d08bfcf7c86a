"""Checks of which role a training of the classroom trains: what a student under training cannot be combined with."""

from collections.abc import Iterator, Mapping, Sequence

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import (
    CORRECT_PERSONA,
    ERROR_PERSONA,
    GRPO,
    NCCL,
    NO_CORRECTIONS,
    NO_CREDIT,
    STUDENT_REWARD,
    TRAINS_STUDENT,
)
from classroom_rl.environments.classroom.record import PEDAGOGICAL
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.messages import read_plan
from classroom_rl.rollout.problem import Problem
from classroom_rl.system.functions import is_function


def check_trained_role(config: TrainRLConfig, weights: Mapping[str, float]) -> None:
    """Check the role under training, and with a student what it is paid for and what is not for it.

    Args:
        weights: of the rewards.

    Raises:
        ConfigError: with the values, the rule and the fix.
    """
    generation = config.generation
    if generation.trained_role != TRAINS_STUDENT:
        if STUDENT_REWARD in weights:
            raise ConfigError(
                f"train.reward_weights names {STUDENT_REWARD}, which pays a student under training, but "
                "generation.trained_role is teacher: leave it out."
            )
        return
    prefix = "generation.trained_role is student, but"
    for key, value, required in _not_for_a_student(config):
        raise ConfigError(
            f"{prefix} {key} is {value}, which is for a teacher under training alone: set {key}={required}."
        )
    tutor_rewards = [
        name
        for name, weight in weights.items()
        if name != STUDENT_REWARD and not is_function(name) and (weight or name != PEDAGOGICAL)
    ]
    if tutor_rewards:
        raise ConfigError(
            f"{prefix} train.reward_weights pays it for the tutor's {', '.join(tutor_rewards)}: it would learn to "
            f"please. Leave train.reward_weights out, or name {STUDENT_REWARD} or a function of your own "
            f"({PEDAGOGICAL} with weight 0 is only recorded)."
        )
    missing = {ERROR_PERSONA, CORRECT_PERSONA} - set(generation.student_personas_prompts_paths)
    if STUDENT_REWARD in weights and missing:
        raise ConfigError(
            f"{prefix} generation.student_personas_prompts_paths lacks {' and '.join(sorted(missing))}, without which "
            f"the reward {STUDENT_REWARD} does not know whether a message should hold an error: name them, or a reward "
            "of your own in train.reward_weights."
        )


def _not_for_a_student(config: TrainRLConfig) -> Iterator[tuple[str, object, object]]:
    """(key, its value, what it has to be) of each key that a student's training refuses: what belongs to the tutor's
    messages, and what has not been tried."""
    generation, train, student = config.generation, config.train, config.student_model
    supervisor = config.supervisor_model.model_name_or_path if config.supervisor_model else None
    for key, value, required in (
        ("train.algorithm", train.algorithm, GRPO),
        ("supervisor_model", supervisor, None),
        ("train.turn_credit.mode", train.turn_credit.mode, NO_CREDIT),
        ("train.corrections.mode", train.corrections.mode, NO_CORRECTIONS),
        ("train.distillation.model", train.distillation.model, None),
        ("generation.post_test.enable", generation.post_test.enable, False),
        ("generation.use_thinking", generation.use_thinking, False),
        ("generation.force_thinking", generation.force_thinking, False),
        ("generation.teacher_tools", generation.teacher_tools, []),
        ("generation.forced_conversation_type", (generation.forced_conversation_type or "null").lower(), "guided"),
        ("teacher_model.lora.enable", config.teacher_model.lora.enable, False),
        ("teacher_model.load_in_4bit", config.teacher_model.load_in_4bit, False),
        ("evaluation.every", config.evaluation.every, 0),
        ("huggingface.push_to_hub", config.huggingface.push_to_hub, False),
        ("train.max_staleness", train.max_staleness, 0),
    ):
        if value != required:
            yield key, value, "null" if required is None else str(required).lower()
    if train.publish_through == NCCL:
        yield "train.publish_through", NCCL, "disk"
    if len(generation.server_urls or []) > 1:
        yield "generation.server_urls", generation.server_urls, "null"
    if student.is_remote:
        yield "student_model", "behind an API", "a model on an engine"
    if student.vllm.temperature <= 0:
        yield "student_model.vllm.temperature", student.vllm.temperature, "1.0"


def check_lessons(problems: Sequence[Problem], config: TrainRLConfig) -> None:
    """Raise a `DataError` for the first problem on which the reward `student` cannot tell right from wrong."""
    for problem in problems if STUDENT_REWARD in reward_weights(config) else ():
        if read_plan(problem.text).lesson is None:
            raise DataError(
                f"Problem {problem.id} ({problem.text[:60]!r}) is no lesson in the quickstart's language, so no rule "
                f"tells the reward {STUDENT_REWARD} what is an error: name one of your own in train.reward_weights."
            )
