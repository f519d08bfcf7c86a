"""What a judge of groups needs of the configuration, and where it is refused."""

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("judge_model.group_prompts_paths", {}, "has no template for pedagogical_eval"),
        ("judge_model.model_name_or_path", "rules", "is group, but rules is no model"),
        ("generation.schedule", "phased", "with generation.schedule=phased they wait for those of all groups"),
        ("train.algorithm", "ppo", "train.algorithm=ppo compares rewards of all conversations"),
    ],
)
def test_what_a_judge_of_groups_needs(key, value, message):
    tutor = load(TrainRLConfig, "train_rl", ("--config-name", "language_tutor", "judge_model.mode=group"))
    check_train_rl(tutor)
    block, name = key.split(".")
    setattr(getattr(tutor, block), name, value)
    with pytest.raises(ConfigError, match=message):
        check_train_rl(tutor)


def test_rules_that_decide_are_not_asked_about_groups():
    with pytest.raises(ConfigError, match=r"is group, but no rule of .* gives scores \(pedagogical_eval\)"):
        load(TrainRLConfig, "train_rl", ("--config-name", "7b", "judge_model.mode=group"), check_train_rl)


def test_an_evaluation_judges_one_by_one():
    with pytest.raises(ConfigError, match=r"judge_model.mode is group, .* what is measured is judged one by one"):
        load(EvalConfig, "eval", ["--config-name", "language_tutor", "judge_model.mode=group"], check_eval)
