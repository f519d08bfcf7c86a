"""What PPO cannot be combined with, and with which words it is refused."""

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError

PPO = "train.algorithm=ppo"
SUPERVISED = ["supervisor_model.model_name_or_path=rubric"]


def loaded(*overrides: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", overrides, check_train_rl)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.loss_type=cispo"], r"train\.loss_type is cispo, which says which loss GRPO has; .* set it to dapo"),
        (["train.scale_rewards=none"], r"train\.scale_rewards is none, .*compares the conversations of a group"),
        (
            [*SUPERVISED, "train.corrections.mode=same_step"],
            r"corrections\.mode is same_step, which .*ppo cannot",
        ),
        (
            [*SUPERVISED, "train.turn_credit.mode=immediate", "generation.supervisor.on_invalid=retry"],
            r"on_invalid is retry, but train\.algorithm=ppo does not train on rejected drafts: .*on_invalid=observe",
        ),
        (
            [*SUPERVISED, "train.turn_credit.mode=to_go"],
            r"turn_credit\.mode is to_go; .* none or immediate",
        ),
        (["train.mu=1", "train.ppo.target_kl=0.02"], r"target_kl is 0\.02, but train\.mu is 1: .*Set train\.mu to 2"),
        (
            ["train.max_steps=5", "train.ppo.value_warmup_steps=5"],
            r"warmup_steps is 5 and train\.max_steps 5",
        ),
    ],
)
def test_what_does_not_go_with_ppo_is_refused_and_goes_with_grpo(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(PPO, *overrides)
    assert loaded(*overrides).train.algorithm == "grpo"


def test_what_goes_with_ppo() -> None:
    limits = ["train.ppo.target_kl=0.02", "train.ppo.value_warmup_steps=5"]
    config = loaded(PPO, "train.mu=2", "train.max_steps=6", *limits)
    assert config.train.ppo.target_kl == 0.02 and config.train.ppo.value_warmup_steps == 5
    priced = loaded(PPO, *SUPERVISED, "train.turn_credit.mode=immediate")
    assert priced.train.turn_credit.mode == "immediate"
    assert loaded("--config-name", "quickstart_ppo").train.algorithm == "ppo"
