"""The classroom's part of a configuration: what it means for conversations, the shipped configurations of the maths
tutor, and what is refused of roles behind APIs."""

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.environments.classroom.config import MATHS_REWARDS, classroom_rules, default_weights, setup_options
from classroom_rl.environments.classroom.setup import ConversationType
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.datasets import load_problems

DECIDING = ("does_not_leak_answer", "follows_pedagogical_values")


def train_rl(*overrides: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", overrides, check_train_rl)


def evaluation(*overrides: str) -> EvalConfig:
    return load(EvalConfig, "eval", ("server_url=null", *overrides), check_eval)


@pytest.mark.parametrize(
    ("rules", "rewards"),
    [
        (("pedagogical_eval",), ("pedagogical",)),
        ((*DECIDING, "pedagogical_eval"), ("pedagogical",)),
        (DECIDING, MATHS_REWARDS),
        ((), MATHS_REWARDS),
    ],
)
def test_judge_rules_imply_the_rewards(rules, rewards):
    generation = GenerationConfig(judges_rules_prompts_paths=dict.fromkeys(rules, "a.txt"))
    assert default_weights(generation) == dict.fromkeys(rewards, 1.0)


@pytest.mark.parametrize(("use", "force"), [(False, False), (True, False), (False, True)])
def test_thoughts_pay_if_the_teacher_is_told_or_forced_to_think(use, force):
    generation = GenerationConfig(use_thinking=use, force_thinking=force)
    assert classroom_rules(generation, {"thinking": 1.0}, 1024, graded=False).use_thinking == (use or force)


@pytest.mark.parametrize(
    ("weights", "graded", "solutions"), [({"end_rm": 1.0}, True, 8), ({"end_rm": 1.0}, False, 0), ({}, True, 0)]
)
def test_solutions_are_written_only_if_they_are_graded_and_rewarded(weights, graded, solutions):
    generation = GenerationConfig(number_student_attempts=8)
    assert classroom_rules(generation, weights, 1024, graded).solutions == solutions


def test_a_conversation_is_as_long_as_the_shorter_of_its_limit_and_the_teachers_context():
    for context, tokens in ((512, 512), (4096, 1024)):
        rules = classroom_rules(GenerationConfig(max_tokens_in_conversation=1024), {}, context, graded=True)
        assert rules.max_tokens_in_conversation == tokens


# The maths tutor ----------------------------------------------------------------------------------------------------


def test_7b_has_the_shape_of_the_paper():
    config = train_rl("--config-name", "7b.yaml")
    train, generation = config.train, config.generation
    assert (train.number_of_problems_per_batch, train.num_samples_per_problem) == (16, 8)
    assert (train.learning_rate, train.beta, train.mu, train.epsilon) == (5e-7, 0.001, 2, 0.2)
    assert (train.lr_scheduler_type, train.optimizer) == ("constant", "adamw_bnb_8bit")
    assert config.teacher_model.vllm.temperature == 1.0
    assert (config.teacher_model.vllm.top_k, config.teacher_model.vllm.top_p) == (-1, 1.0), "what GRPO trains"
    assert list(generation.judges_rules_prompts_paths) == list(DECIDING) and generation.number_judge_attempts == 2
    assert (generation.number_student_attempts, generation.extra_penalty_for_rejected_judges) == (8, 1.0)
    assert (generation.max_turns, generation.max_tokens_per_turn, generation.ignore_rejected_judge) == (15, 1024, False)
    assert [role.model_name_or_path for role in (config.teacher_model, config.student_model, config.judge_model)] == [
        "Qwen/Qwen2.5-7B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        "Qwen/Qwen2.5-14B-Instruct-AWQ",
    ]
    source = config.dataset.train_datasets[0]
    assert source.name_or_path == "rd211/Big-Math-RL-Verified-Filtered"
    assert (source.problem_column, source.answer_column) == ("problem", "answer")


@pytest.mark.parametrize("name", ["7b", "maths_small"])
def test_maths_configs_play_both_types_and_grade_solutions(name):
    config = train_rl("--config-name", name)
    assert reward_weights(config) == dict.fromkeys(MATHS_REWARDS, 1.0)
    assert setup_options(config.generation).types == tuple(ConversationType)
    rules = classroom_rules(config.generation, reward_weights(config), 8192, graded=True)
    assert rules.judge_rules == DECIDING and rules.solutions == config.generation.number_student_attempts
    off = train_rl("--config-name", name, "generation.number_judge_attempts=0").generation
    assert classroom_rules(off, reward_weights(config), 8192, graded=True).judge_rules == ()


def test_the_small_config_trains_on_the_shipped_problems():
    assert len(load_problems(train_rl("--config-name", "maths_small").dataset.train_datasets)) == 200


# Roles behind APIs --------------------------------------------------------------------------------------------------


def test_a_student_of_a_training_and_a_teacher_of_an_evaluation_may_be_behind_an_api():
    assert train_rl("student_model.use_gemini=true").student_model.is_remote
    assert evaluation("teacher_model.use_openrouter=true").teacher_model.is_remote


@pytest.mark.parametrize(
    ("load_program", "overrides", "message"),
    [
        (train_rl, ["teacher_model.use_openrouter=true"], "behind an API, which gives neither token ids nor log-probs"),
        (train_rl, ["teacher_model.model_name_or_path=script:ideal"], "a script can be measured by eval.py and not be"),
        (train_rl, ["teacher_model.replies_per_attempt=3"], "no config key teacher_model.replies_per_attempt"),
        (train_rl, ["student_model.max_failed_share=0.1"], "no config key student_model.max_failed_share"),
        (train_rl, ["student_model.max_cost_usd=5"], "max_cost_usd is 5.0; it needs student_model.usd_per_million"),
        (train_rl, ["student_model.base_url=openrouter.ai"], "base_url is 'openrouter.ai'; it must begin with http"),
        (train_rl, ["student_model.deadline_s=0"], "student_model.deadline_s is 0; it must be above 0"),
        (
            evaluation,
            ["teacher_model.use_openrouter=true", "generation.force_thinking=true"],
            "generation.force_thinking is true, but teacher_model is behind an API",
        ),
        (
            evaluation,
            ["teacher_model.use_openrouter=true", "teacher_model.deadline_s=4000"],
            r"teacher_model.deadline_s is 4000.*must be less than generation.sample_timeout",
        ),
    ],
)
def test_what_is_refused_of_roles_behind_apis(load_program, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_program(*overrides)
