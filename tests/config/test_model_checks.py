"""How the models of the roles are reached, and what a judge of groups needs."""

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from tests.support.configs import loaded


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


def test_a_judge_has_one_address_and_is_given_up_before_the_batch_is():
    with pytest.raises(ConfigError, match="use_openrouter and judge_model.use_gemini are both set"):
        loaded("train_rl", "judge_model.use_openrouter=true", "judge_model.use_gemini=true")
    patient = ("judge_model.use_openrouter=true", "judge_model.deadline_s=100", "generation.sample_timeout_s=100")
    for folder, here in (("train_rl", ()), ("eval", ("server_url=null",))):
        with pytest.raises(ConfigError, match=r"deadline_s is 100; it must be less than generation.sample_timeout_s"):
            loaded(folder, *patient, *here)
