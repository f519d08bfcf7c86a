"""GAE over tokens and over messages, on numbers worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.trainer.advantages import (
    NO_STEP,
    cut_before_last_step,
    estimate,
    first_tokens,
    gae,
    mean_and_variance,
    moments,
    token_rewards,
    whitened,
)

X = 99.0
"""Stands where nothing may be read."""


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


ENDED = torch.zeros(1, dtype=torch.float64)


def test_three_steps_in_a_row_by_hand():
    """δ = 0 + 0.9·0.6 − 0.5 = 0.04, 0.9·0.7 − 0.6 = 0.03, 1 − 0.7 = 0.3; γλ = 0.45."""
    advantages = gae(row(0, 0, 1), row(0.5, 0.6, 0.7), row(1, 1, 1), ENDED, 0.9, 0.5)
    assert advantages[0].tolist() == pytest.approx([0.04 + 0.45 * (0.03 + 0.45 * 0.3), 0.03 + 0.45 * 0.3, 0.3])


def test_gamma_and_lambda_cross_the_turns_from_one_sampled_token_to_the_next():
    """The same three steps, with the student's tokens and the template's between and around them."""
    rewards, values = row(X, 0, X, X, 0, X, 1, X), row(X, 0.5, X, X, 0.6, X, 0.7, X)
    advantages = gae(rewards, values, row(0, 1, 0, 0, 1, 0, 1, 0), ENDED, 0.9, 0.5)
    dense = gae(row(0, 0, 1), row(0.5, 0.6, 0.7), row(1, 1, 1), ENDED, 0.9, 0.5)[0].tolist()
    assert advantages[0].tolist() == pytest.approx([0, dense[0], 0, 0, dense[1], 0, dense[2], 0])


def test_a_conversation_that_was_cut_goes_on_with_its_bootstrap_and_one_that_ended_with_nothing():
    """Last δ: cut 0.2 + 0.9·0.8 − 0.7 = 0.22, ended 0.2 − 0.7 = −0.5."""
    rewards, values, mask = (tensor.repeat(2, 1) for tensor in (row(0, 0.2, X), row(0.5, 0.7, X), row(1, 1, 0)))
    advantages = gae(rewards, values, mask, torch.tensor([0.8, 0.0], dtype=torch.float64), 0.9, 0.5)
    first = 0.9 * 0.7 - 0.5
    assert advantages[:, 1].tolist() == pytest.approx([0.22, -0.5])
    assert advantages[:, 0].tolist() == pytest.approx([first + 0.45 * 0.22, first - 0.45 * 0.5])
    assert advantages[:, 2].tolist() == [0, 0]


MESSAGES = torch.tensor([[0, 0, NO_STEP, 1, 1, 1, NO_STEP], [NO_STEP, 0, 0, NO_STEP, NO_STEP, 2, NO_STEP]])
"""Two conversations; in the second one, message 1 was not sampled."""


def test_over_turns_a_message_is_one_step_and_its_tokens_share_the_advantage():
    """Row 0: message 1 has reward 1 − 0.1 in state 0.6: 0.3; message 0: 0.9·0.6 − 0.5 + 0.45·0.3 = 0.175.
    Row 1, cut at a state worth 0.4: 0.9·0.4 − 0.2 = 0.16, and 0.9·0.2 − 0.1 + 0.45·0.16 = 0.152."""
    values = torch.tensor([[0.5, X, X, 0.6, X, X, X], [X, 0.1, X, X, X, 0.2, X]])
    rewards = torch.tensor([[0, 0, X, -0.1, 0, 1, X], [X, 0, 0, X, X, 0, X]])
    estimated = estimate(rewards, values, MESSAGES, torch.tensor([0.0, 0.4]), 0.9, 0.5, "turns")
    assert estimated.advantages[0].tolist() == pytest.approx([0.175, 0.175, 0, 0.3, 0.3, 0.3, 0])
    assert estimated.advantages[1].tolist() == pytest.approx([0, 0.152, 0.152, 0, 0, 0.16, 0])
    assert estimated.value_mask.int().tolist() == [[1, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0]]
    assert estimated.returns[0].tolist() == pytest.approx([0.675, 0, 0, 0.9, 0, 0, 0])


def test_a_message_with_a_tool_s_answer_inside_is_still_one_step():
    messages = torch.tensor([[0, NO_STEP, 0, NO_STEP, 1, NO_STEP, 1]])
    assert first_tokens(messages).int().tolist() == [[1, 0, 0, 0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("over", "kept", "value"),
    [("tokens", [0, 0, -1, 1, 1, -1, -1], 0.6), ("turns", [0, 0, -1, -1, -1, -1, -1], 0.4)],
)
def test_an_episode_that_was_cut_counts_up_to_the_state_before_its_last_step(over: str, kept: list, value: float):
    """A step is a token, or a whole message; episodes that ended, and those without a step, stay as they are."""
    messages = torch.cat([MESSAGES[:1], MESSAGES, torch.full((1, 7), NO_STEP)])
    values = torch.arange(0.1, 0.8, 0.1).repeat(4, 1)
    shortened, bootstrap = cut_before_last_step(messages, torch.tensor([True, False, False, True]), values, over)
    assert shortened[0].tolist() == kept
    assert torch.equal(shortened[1:], messages[1:])
    assert bootstrap.tolist() == pytest.approx([value, 0, 0, 0])


@pytest.mark.parametrize("over", ["tokens", "turns"])
def test_lambda_1_and_a_critic_at_zero_is_the_monte_carlo_return(over: str):
    rewards = torch.tensor([[0, 0.5, X, 0, 0, 1, X], [X, 0, -1, X, X, 2, X]])
    estimated = estimate(rewards, torch.zeros(2, 7), MESSAGES, torch.zeros(2), 1.0, 1.0, over)
    expected = {"tokens": [1.5, 1.5, 0, 1, 1, 1, 0], "turns": [1.5, 1.5, 0, 1, 1, 1, 0]}[over]
    assert estimated.advantages[0].tolist() == pytest.approx(expected)
    assert estimated.advantages[1].tolist() == pytest.approx([0, 1, 1, 0, 0, 2, 0])


def test_the_returns_are_what_the_critic_should_have_said():
    rewards, values = torch.tensor([[0.0, 0, X, 0, 0, 1, X]]), torch.tensor([[0.1, 0.2, X, 0.3, 0.4, 0.5, X]])
    estimated = estimate(rewards, values, MESSAGES[:1], torch.zeros(1), 1.0, 1.0, "tokens")
    assert estimated.returns[0].tolist() == pytest.approx([1, 1, 0, 1, 1, 1, 0])


def test_the_outcome_is_at_the_last_sampled_token():
    process = torch.tensor([[0, 0.1, 0, 0, 0, 0.2, 0], [0.0] * 7])
    rewards = token_rewards(MESSAGES, process, torch.tensor([1.0, 3.0]))
    assert rewards[0].tolist() == pytest.approx([0, 0.1, 0, 0, 0, 1.2, 0])
    assert rewards[1].tolist() == pytest.approx([0, 0, 0, 0, 0, 3, 0])
    no_rewards = token_rewards(torch.full((1, 3), NO_STEP), torch.zeros(1, 3), torch.tensor([5.0]))
    assert no_rewards.tolist() == [[0, 0, 0]], "a row without a sampled token gets nothing"


numbers = st.floats(-2, 2, allow_nan=False)
steps = st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=25)


@given(steps=steps, bootstrap=numbers, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_the_masked_recursion_is_the_dense_one_on_what_was_sampled(steps, bootstrap, gamma, lam):
    rewards, values, mask = (row(*column) for column in zip(*steps, strict=True))
    end = torch.tensor([bootstrap], dtype=torch.float64)
    sampled = mask[0].bool()
    dense = gae(rewards[:, sampled], values[:, sampled], torch.ones(1, int(sampled.sum())), end, gamma, lam)
    advantages = gae(rewards, values, mask, end, gamma, lam)
    assert torch.allclose(advantages[:, sampled], dense) and not advantages[:, ~sampled].any()


@given(steps=steps, gamma=st.floats(0, 1))
def test_lambda_0_is_the_error_of_one_step_and_lambda_1_ignores_the_values_in_between(steps, gamma):
    rewards, values, _ = (row(*column) for column in zip(*steps, strict=True))
    ones = torch.ones_like(values)
    after = torch.cat([values[:, 1:], ENDED.unsqueeze(0)], dim=1)
    assert torch.allclose(gae(rewards, values, ones, ENDED, gamma, 0.0), rewards + gamma * after - values)
    returns = gae(rewards, values, ones, ENDED, gamma, 1.0) + values
    assert torch.allclose(returns, gae(rewards, torch.zeros_like(values), ones, ENDED, gamma, 1.0), atol=1e-9)


def test_whitening_counts_what_the_mask_shows_on_all_processes():
    """1, 2 and 3 here, 6 elsewhere: mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5."""
    values, mask = torch.tensor([[1.0, X, 2, 3]]), torch.tensor([[1, 0, 1, 1]])
    summed = moments(values, mask) + moments(torch.tensor([[6.0, X]]), torch.tensor([[1, 0]]))
    assert mean_and_variance(summed) == pytest.approx((3, 3.5))
    deviation = 3.5**0.5
    whitened_values = whitened(values, mask, summed)
    assert whitened_values[0].tolist() == pytest.approx([-2 / deviation, 0, -1 / deviation, 0])


def test_nothing_is_whitened_to_nothing():
    mask = torch.zeros(2, 3)
    summed = moments(torch.full((2, 3), X), mask)
    assert mean_and_variance(summed) == (0, 0) and not whitened(torch.full((2, 3), X), mask, summed).any()
