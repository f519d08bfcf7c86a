"""Rules between keys of a training: batch, judge, rewards and post-test."""

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.environments.classroom.config import REWARD_NAMES, classroom_rules, default_weights
from classroom_rl.environments.classroom.prompt_check import check_prompts
from classroom_rl.errors import ConfigError, DataError
from tests.support.configs import loaded, training

POST_TEST = "generation.post_test.enable=true"
ASKED = "generation.post_test.ask_student=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher_model.vllm.temperature=0"], "temperature is 0.*every conversation of a group would be the same"),
        (
            ["train.number_of_problems_per_batch=1024", "train.num_samples_per_problem=8"],
            r"\(1024 × 8 = 8192\) is more than the 4096 conversations",
        ),
        (
            [
                *("train.number_of_problems_per_batch=16", "train.num_samples_per_problem=8"),
                *("train.per_device_train_batch_size=7", "train.loss_type=bnpo"),
            ],
            r"\(16 × 8 = 128\) must be divisible by .*\(7\)",
        ),
        ([ASKED], "there is no post-test: set generation.post_test.enable=true"),
        ([POST_TEST, ASKED], "generation.post_test.prompt_path is null: name the template"),
        (
            [POST_TEST, "generation.post_test.scored_by=student"],
            "scored_by is student, but nobody asks the student's model",
        ),
        (["+train.reward_weights={pedagogical: 1.0, post_test: 0.5}"], "The post_test reward needs a post-test"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_with_the_reason(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training(*overrides)


def test_epochs_and_steps_cannot_both_be_nothing():
    with pytest.raises(ConfigError, match="train.epochs is 0 and train.max_steps -1: nothing would be trained"):
        loaded("train_sft", "train.epochs=0", "train.max_steps=-1")


def test_it_is_off_and_no_reward_counts_it_unless_it_is_named() -> None:
    """Without a post-test, what a batch depends on is written as it was before there were any."""
    config = training()
    assert not config.generation.post_test.enable and "post_test" in REWARD_NAMES
    on = training(POST_TEST)
    assert "post_test" not in default_weights(on.generation)
    assert "post_test" not in repr(config.generation.identity())
    assert "post_test" not in repr(classroom_rules(config.generation, {}, 900, True))
    assert [classroom_rules(variant.generation, {}, 900, True).post_test for variant in (config, on)] == ["", "ledger"]


def test_what_belongs_together_is_taken() -> None:
    template = "generation.post_test.prompt_path=prompt_templates/post_test/quickstart.txt"
    weights = "+train.reward_weights={pedagogical: 1.0, post_test: 0.5}"
    config = training(POST_TEST, ASKED, "generation.post_test.scored_by=student", template, weights)
    assert classroom_rules(config.generation, {}, 900, True).post_test == "student"
    check_prompts(config.generation, judge_reads_templates=False)


@pytest.mark.parametrize("name", ["language", "maths", "quickstart"])
def test_the_templates_are_tried_before_a_run(name: str) -> None:
    def check(path: str) -> None:
        check_prompts(training(POST_TEST, ASKED, f"generation.post_test.prompt_path={path}").generation, False)

    check(f"{ROOT}/prompt_templates/post_test/{name}.txt")
    check("prompt_templates/student_final_prompt.txt")  # it uses the problem, which it may
    with pytest.raises(DataError, match="generation.post_test.prompt_path: .* uses conversation"):
        check("prompt_templates/judges/language_tutor_eval.txt")
