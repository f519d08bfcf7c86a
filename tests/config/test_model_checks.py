"""How the models of the roles are reached, and what a judge of groups needs."""

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from tests.support.configs import loaded

GROUP = "judge_model.mode=group"
PATIENT = ("judge_model.use_openrouter=true", "judge_model.deadline_s=100", "generation.sample_timeout_s=100")


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
    tutor = load(TrainRLConfig, "train_rl", ("--config-name", "language_tutor", GROUP))
    check_train_rl(tutor)
    block, name = key.split(".")
    setattr(getattr(tutor, block), name, value)
    with pytest.raises(ConfigError, match=message):
        check_train_rl(tutor)


@pytest.mark.parametrize(
    ("folder", "overrides", "message"),
    [
        ("train_rl", ["--config-name=7b", GROUP], r"is group, but no rule of .* gives scores \(pedagogical_eval\)"),
        (
            "eval",
            ["--config-name=language_tutor", GROUP],
            "judge_model.mode is group, .* is judged one by one",
        ),
        (
            "train_rl",
            ["judge_model.use_openrouter=true", "judge_model.use_gemini=true"],
            "use_openrouter and judge_model.use_gemini are both set",
        ),
        ("train_rl", PATIENT, r"deadline_s is 100; it must be less than generation.sample_timeout_s"),
        ("eval", [*PATIENT, "server_url=null"], r"deadline_s is 100; it must be less than generation.sample_timeout_s"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(folder: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(folder, *overrides)
