"""The post-test's keys: off by default, and refused where they contradict each other."""

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.config import REWARD_NAMES, classroom_rules, default_weights
from classroom_rl.environments.classroom.prompt_check import check_prompts
from classroom_rl.errors import ConfigError, DataError

TEMPLATE = "generation.post_test.prompt_path=prompt_templates/post_test/quickstart.txt"


def configured(*overrides: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", ["--config-name=quickstart", *overrides], check_train_rl)


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
