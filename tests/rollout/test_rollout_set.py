"""Sets of rollouts as lists, and new rewards without an engine."""

import asyncio
from dataclasses import replace

import pytest

from classroom_rl import Rollout, RolloutSet
from classroom_rl.errors import ConfigError, DataError
from tests.support.played_rollouts import made


def test_sets_of_different_rollouts_differ() -> None:
    one = made(0)
    assert RolloutSet([one]) == RolloutSet([made(0)])
    changed = replace(one, steps=(one.steps[0], replace(one.steps[1], logprobs=(-0.1, -0.2, -0.3))))
    assert RolloutSet([one]) != RolloutSet([changed]) and RolloutSet([one]) != RolloutSet([one, one])
    assert RolloutSet([one]) != [one]


def test_a_set_is_a_list_of_rollouts() -> None:
    rollouts = RolloutSet(map(made, range(3)))
    assert len(rollouts) == 3 and rollouts[1].id == "1-0" and rollouts[-1] in rollouts
    assert rollouts[1:] == RolloutSet([made(1), made(2)]) and rollouts[:1] + rollouts[1:] == rollouts
    assert rollouts.where(lambda rollout: rollout.seed > 1) == rollouts[2:]
    assert repr(rollouts) == "<RolloutSet of 3 rollouts with 6 steps>"
    with pytest.raises(DataError, match="entry 0"):
        RolloutSet(["text"])


def test_rewards_are_computed_again_without_an_engine() -> None:
    rollouts = RolloutSet([made(0, reward=9.0), made(1, length=3)])
    assert [rollout.reward for rollout in rollouts.rescore(lambda rollout: len(rollout.steps))] == [2.0, 3.0]
    assert [rollout.reward for rollout in rollouts] == [9.0, None]
    with pytest.raises(DataError, match="reward of rollout 0-0 cannot be computed: ZeroDivisionError"):
        rollouts.rescore(lambda rollout: 1 / 0)


def test_rewards_may_be_computed_by_an_async_function() -> None:
    async def judged(rollout: Rollout) -> float:
        return float(rollout.seed) if rollout.seed < 2 else 1 / 0

    rollouts = RolloutSet(map(made, range(3)))
    with pytest.raises(ConfigError, match="rescore_async"):
        rollouts.rescore(judged)
    assert [rollout.reward for rollout in asyncio.run(rollouts[:2].rescore_async(judged))] == [0.0, 1.0]
    with pytest.raises(DataError, match="reward of rollout 2-0 cannot be computed: ZeroDivisionError"):
        asyncio.run(rollouts.rescore_async(judged))
