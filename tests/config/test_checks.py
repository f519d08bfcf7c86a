"""Rules between keys of a training: batch, judge, rewards and post-test."""

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.config import REWARD_NAMES, classroom_rules, default_weights
from classroom_rl.environments.classroom.prompt_check import check_prompts
from classroom_rl.errors import ConfigError, DataError
from tests.support.configs import loaded


def test_a_teacher_without_temperature_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="temperature is 0.*every conversation of a group would be the same"):
        loaded("train_rl", "teacher_model.vllm.temperature=0")


def test_more_samples_than_a_server_holds_are_refused_with_all_numbers():
    sizes = ("number_of_problems_per_batch=1024", "num_samples_per_problem=8")
    with pytest.raises(ConfigError, match=r"\(1024 × 8 = 8192\) is more than the 4096 conversations"):
        loaded("train_rl", *(f"train.{size}" for size in sizes))


def test_a_batch_that_does_not_divide_is_refused_with_all_numbers():
    sizes = (
        "number_of_problems_per_batch=16 num_samples_per_problem=8 per_device_train_batch_size=7 loss_type=bnpo".split()
    )
    with pytest.raises(ConfigError, match=r"\(16 × 8 = 128\) must be divisible by .*\(7\)"):
        loaded("train_rl", *(f"train.{size}" for size in sizes))


def test_epochs_and_steps_cannot_both_be_nothing():
    with pytest.raises(ConfigError, match="train.epochs is 0 and train.max_steps -1: nothing would be trained"):
        loaded("train_sft", "train.epochs=0", "train.max_steps=-1")


TEMPLATE = "generation.post_test.prompt_path=prompt_templates/post_test/quickstart.txt"


def configured(*overrides: str) -> TrainRLConfig:
    return loaded("train_rl", "--config-name=quickstart", *overrides)


def test_it_is_off_and_no_reward_counts_it_unless_it_is_named() -> None:
    config = configured()
    assert not config.generation.post_test.enable and "post_test" in REWARD_NAMES
    on = configured("generation.post_test.enable=true")
    assert "post_test" not in default_weights(on.generation)
    assert [classroom_rules(each.generation, {}, 900, True).post_test for each in (config, on)] == ["", "ledger"]


def test_an_old_run_goes_on_as_the_same_one() -> None:
    """Without a post-test, what a batch depends on is written as it was before there were any."""
    config = configured()
    assert "post_test" not in repr(config.generation.identity())
    assert "post_test" not in repr(classroom_rules(config.generation, {}, 900, True))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["generation.post_test.ask_student=true"], "there is no post-test: set generation.post_test.enable=true"),
        (
            ["generation.post_test.enable=true", "generation.post_test.ask_student=true"],
            "generation.post_test.prompt_path is null: name the template",
        ),
        (
            ["generation.post_test.enable=true", "generation.post_test.scored_by=student"],
            "scored_by is student, but nobody asks the student's model",
        ),
        (["+train.reward_weights={pedagogical: 1.0, post_test: 0.5}"], "The post_test reward needs a post-test"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(*overrides)


def test_what_belongs_together_is_taken() -> None:
    config = configured(
        "generation.post_test.enable=true",
        "generation.post_test.ask_student=true",
        "generation.post_test.scored_by=student",
        TEMPLATE,
        "+train.reward_weights={pedagogical: 1.0, post_test: 0.5}",
    )
    assert classroom_rules(config.generation, {}, 900, True).post_test == "student"
    check_prompts(config.generation, judge_reads_templates=False)


@pytest.mark.parametrize("name", ["language", "maths", "quickstart"])
def test_the_templates_are_tried_before_a_run(name: str) -> None:
    path = f"{ROOT}/prompt_templates/post_test/{name}.txt"
    on = ["generation.post_test.enable=true", "generation.post_test.ask_student=true"]
    check_prompts(configured(*on, f"generation.post_test.prompt_path={path}").generation, False)
    wrong = "generation.post_test.prompt_path=prompt_templates/student_final_prompt.txt"
    check_prompts(configured(*on, wrong).generation, False)  # it uses the problem, which it may
    judge = "generation.post_test.prompt_path=prompt_templates/judges/language_tutor_eval.txt"
    with pytest.raises(DataError, match="generation.post_test.prompt_path: .* uses conversation"):
        check_prompts(configured(*on, judge).generation, False)
