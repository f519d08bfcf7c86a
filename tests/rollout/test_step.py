"""What the record of a rollout says about itself."""

from dataclasses import replace

import pytest

from classroom_rl.rollout.step import End
from tests.support.played_rollouts import made


def test_each_token_of_a_step_has_a_mask_value_and_a_log_prob() -> None:
    with pytest.raises(ValueError, match="step 0 has 1 ids, 3 mask values and 3 log-probs"):
        replace(made(0).steps[0], ids=(7,))


@pytest.mark.parametrize(
    ("end", "last_step", "answer"),
    [
        (End("terminated", "stop"), {}, "so"),
        (End("terminated", "stop"), {"finish_reason": "length"}, None),
        (End("terminated", "stop"), {"thought_state": "cut"}, None),
        (End("truncated", "max_steps"), {}, None),
        (End("failed", "error"), {}, None),
    ],
)
def test_only_the_whole_last_message_of_a_terminated_rollout_is_an_answer(end: End, last_step: dict, answer) -> None:
    rollout = made(0, end=end)
    rollout = replace(rollout, steps=(rollout.steps[0], replace(rollout.last, **last_step)))
    assert rollout.answer == answer and rollout.last.cut == bool(last_step)
    assert (rollout.terminated, rollout.truncated, rollout.failed) == tuple(
        end.state == state for state in ("terminated", "truncated", "failed")
    )


def test_a_rollout_before_its_first_step_has_no_answer() -> None:
    rollout = made(0, length=0)
    assert rollout.last is None and rollout.answer is None and rollout.tokens == 0


@pytest.mark.parametrize(
    ("value", "step_rewards", "reward"),
    [(None, (), None), (2, (), 2.0), ([0.25, None], (0.25, None), 0.25), ([None, None], (None, None), None)],
)
def test_a_rollout_is_scored_as_a_whole_or_by_step(value, step_rewards, reward) -> None:
    rollout = made(0, reward=9.0).scored(value)
    assert (rollout.step_rewards, rollout.reward) == (step_rewards, reward)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("good", "a number, None, or a list"),
        ({"0": 1.0}, "a number, None, or a list"),
        ([1.0, "x"], "a reward is a number"),
        (float("nan"), "it must be finite"),
        ([1.0, float("inf")], "it must be finite"),
        ([1.0], "1 rewards for 2 steps"),
    ],
)
def test_what_is_no_reward_is_refused(value, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(0).scored(value)
