"""Which role a training trains: what a student under training is paid for, and what it cannot be combined with."""

import pytest

from classroom_rl.config.training_checks import reward_weights
from classroom_rl.environments.classroom.config import rows_per_episode
from classroom_rl.environments.classroom.role_checks import check_lessons
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.rollout.environment import most_rows
from classroom_rl.rollout.problem import Problem
from tests.support.configs import loaded, training
from tests.support.toy_lesson import PROBLEM

STUDENT = "generation.trained_role=student"


def test_the_model_under_training_is_the_roles() -> None:
    overrides = ("student_model.model_name_or_path=pupil", "student_model.vllm.temperature=0.5")
    teacher, student = training(*overrides), training(*overrides, STUDENT)
    assert teacher.policy_model is teacher.teacher_model
    assert student.policy_model.model_name_or_path == "pupil" and student.policy_model.vllm.temperature == 0.5
    assert student.policy_model.adapter is None and student.served_teacher == "pupil"


def test_a_student_is_paid_for_its_own_part() -> None:
    assert reward_weights(training()) == {"pedagogical": 1.0}
    assert reward_weights(training(STUDENT)) == {"student": 1.0, "pedagogical": 0.0}
    unjudged = training(STUDENT, "generation.number_judge_attempts=0")
    assert reward_weights(unjudged) == {"student": 1.0}


def test_each_of_its_messages_is_a_sample() -> None:
    student = training(STUDENT, "generation.max_turns=9").generation
    assert rows_per_episode(student) == 5 and rows_per_episode(training().generation) is None
    assert most_rows(training()) is None and most_rows(training(STUDENT)) == 5


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.algorithm=ppo", "train.algorithm=grpo"),
        ("train.algorithm=online_dpo", "train.algorithm=grpo"),
        ("supervisor_model.model_name_or_path=rubric", "supervisor_model=null"),
        ("train.turn_credit.mode=immediate", "train.turn_credit.mode=none"),
        ("train.corrections.mode=same_step", "train.corrections.mode=none"),
        ("train.distillation.model=strong", "train.distillation.model=null"),
        ("generation.post_test.enable=true", "generation.post_test.enable=false"),
        ("generation.use_thinking=true", "generation.use_thinking=false"),
        ("generation.force_thinking=true", "generation.force_thinking=false"),
        ("generation.teacher_tools=[calculator]", "generation.teacher_tools=[]"),
        ("teacher_model.lora.enable=true", "teacher_model.lora.enable=false"),
        ("evaluation.every=5", "evaluation.every=0"),
        ("train.max_staleness=1", "train.max_staleness=0"),
        ("train.publish_through=nccl", "train.publish_through=disk"),
        ("generation.server_urls=[http://127.0.0.1:1,http://127.0.0.1:2]", "generation.server_urls=null"),
        ("student_model.base_url=http://127.0.0.1:1/v1", "student_model=a model on an engine"),
        ("student_model.vllm.temperature=0", "student_model.vllm.temperature=1.0"),
    ],
)
def test_what_is_the_teachers_alone_is_refused(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        training(STUDENT, override)
    assert "generation.trained_role is student" in str(refusal.value) and f"set {says}." in str(refusal.value)


def test_an_attempt_that_opens_is_refused() -> None:
    opening = ["generation.forced_conversation_type=attempt"]
    opening += ["generation.student_initial_attempt_prompt_path=prompt_templates/quickstart/student_correct.txt"]
    training(*opening)
    with pytest.raises(ConfigError, match="forced_conversation_type=guided"):
        training(STUDENT, *opening)


@pytest.mark.parametrize(
    ("weights", "of_tutor"),
    [
        ("{pedagogical: 1}", "pedagogical"),
        ("{student: 1, pedagogical: 0.5}", "pedagogical"),
        ("{student: 1, length: 0}", "length"),
    ],
)
def test_the_tutors_rewards_are_not_the_students(weights: str, of_tutor: str) -> None:
    with pytest.raises(ConfigError, match=f"the tutor's {of_tutor}: it would learn to please"):
        training(STUDENT, f"train.reward_weights={weights}")


def test_a_function_of_ones_own_may_pay_the_student() -> None:
    name = "tests.support.own_rewards:brevity"
    assert reward_weights(training(STUDENT, f"train.reward_weights={{{name}: 1}}")) == {name: 1.0}


def test_the_students_reward_is_not_the_teachers() -> None:
    with pytest.raises(ConfigError, match="generation.trained_role is teacher: leave it out"):
        training("+train.reward_weights={student: 1}")


def test_its_reward_needs_the_drawn_personas_and_lessons_that_rules_can_read() -> None:
    with pytest.raises(ConfigError, match="lacks error_student"):
        training(STUDENT, "~generation.student_personas_prompts_paths.error_student")
    with pytest.raises(DataError, match="no lesson in the quickstart's language"):
        check_lessons([Problem.of(PROBLEM), Problem.of("fractions")], training(STUDENT))
    check_lessons([Problem.of(PROBLEM)], training(STUDENT))


def test_an_evaluation_trains_nobody() -> None:
    with pytest.raises(ConfigError, match="an evaluation trains nobody"):
        loaded("eval", "--config-name", "quickstart", "server_url=null", STUDENT)
