"""Configurations that do not fit are refused."""

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from tests.environments.marooned.test_environment import NAME


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("generation.preset=large", "generation.preset"),
        ("generation.colonists=[nobody]", "generation.colonists"),
        ("generation.colonists=[]", "is empty"),
        ("generation.traitor=nobody", "generation.traitor"),
        ("generation.supervisor.show_critique=true", "without the critique"),
        ("+generation.supervisor.penalties.leak=-1", "leak"),
        ("generation.supervisor.penalties.format=1", "at most 0"),
        ("train.algorithm=ppo generation.self_play=true", "train.algorithm is ppo"),
        ("train.shuffle_rewards=true generation.self_play=true", "a reward of its own"),
    ],
)
def test_configurations_are_checked(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(TrainRLConfig, "train_rl", [*NAME, *overrides.split()], check_train_rl)
