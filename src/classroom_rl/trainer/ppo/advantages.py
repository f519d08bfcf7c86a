"""Generalised advantage estimation over the tokens of conversations, or over their messages.

A step is what the policy decides: a token that it sampled, or a whole message. Tokens of the chat template and of the
student lie between steps and are none: γ and λ count from one step to the next one, across the messages in between.
With V the critic, r the reward of a step and t + 1 the step after t,

    δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γλ·A_{t+1}        return_t = A_t + V_t

(Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", equations 12 and
16). At the end of an episode V_{t+1} is its bootstrap: 0 if it ended by the environment's rules. What the last step of
an episode that was cut led to is not known, and the critic is not trained on states that no step follows: such an
episode counts up to the state before its last step, whose value is its bootstrap (`cut_before_last_step`). With λ = 1
and a critic that is 0 everywhere, A_t is the Monte-Carlo return.

In all shapes, R is the number of rows (episodes) and T the longest completion in tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from classroom_rl.config.values import TURNS

NO_STEP = -1


@dataclass(frozen=True)
class Estimates:
    """What is trained on of a batch; all of shape (R, T).

    Attributes:
        advantages: of each sampled token, 0 elsewhere.
        returns: what the critic should say of the state before a token, 0 where `value_mask` is.
        value_mask: true where the critic is trained: before each sampled token, or before the first one of a message.
    """

    advantages: Tensor
    returns: Tensor
    value_mask: Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, gamma: float, lam: float) -> Tensor:
    """The advantage of every step.

    Args:
        rewards: the reward of each step, of shape (R, T); what stands where `mask` is 0 does not count.
        values: the critic's value of the state before each step, of shape (R, T).
        mask: 1 for steps, of shape (R, T).
        bootstrap: the value of the state after the last step, of shape (R,): 0 for an episode that has ended.
        gamma, lam: the discount γ and the λ of the estimator, from 0 to 1.

    Returns:
        The advantages, of shape (R, T); 0 where there is no step.
    """
    advantages = torch.zeros_like(values)
    value_after, advantage_after = bootstrap, torch.zeros_like(bootstrap)
    for place in reversed(range(values.size(1))):
        is_step = mask[:, place].bool()
        error = rewards[:, place] + gamma * value_after - values[:, place]
        advantage = error + gamma * lam * advantage_after
        advantages[:, place] = torch.where(is_step, advantage, 0.0)
        advantage_after = torch.where(is_step, advantage, advantage_after)
        value_after = torch.where(is_step, values[:, place], value_after)
    return advantages


def estimate(
    rewards: Tensor, values: Tensor, messages: Tensor, bootstrap: Tensor, gamma: float, lam: float, over: str
) -> Estimates:
    """Advantages and returns over tokens, or over messages (`turns`).

    Args:
        messages: the number of the message that each sampled token belongs to, from 0 and not falling along a row;
            `NO_STEP` for all other tokens.
        over: `tokens`: each sampled token is a step. `turns`: each message is one, in the state before its first
            token; its reward is the sum over its tokens, and all of them have its advantage.
    """
    if over == TURNS:
        return _over_messages(rewards, values, messages, bootstrap, gamma, lam)
    mask = messages != NO_STEP
    advantages = gae(rewards, values, mask, bootstrap, gamma, lam)
    return Estimates(advantages, torch.where(mask, advantages + values, 0.0), mask)


def _over_messages(
    rewards: Tensor, values: Tensor, messages: Tensor, bootstrap: Tensor, gamma: float, lam: float
) -> Estimates:
    mask, first = messages != NO_STEP, first_tokens(messages)
    numbers = messages.clamp(min=0)
    shape = (len(messages), int(messages.max().clamp(min=0)) + 1)

    def by_message(tokens: Tensor, counted: Tensor) -> Tensor:
        """The sums over the counted tokens of each message, of shape (R, messages)."""
        return values.new_zeros(shape).scatter_add(1, numbers, torch.where(counted, tokens, 0.0))

    steps = by_message(torch.ones_like(values), first)
    own = gae(by_message(rewards, mask), by_message(values, first), steps, bootstrap, gamma, lam)
    advantages = torch.where(mask, own.gather(1, numbers), 0.0)
    return Estimates(advantages, torch.where(first, advantages + values, 0.0), first)


def first_tokens(messages: Tensor) -> Tensor:
    """True for the first sampled token of every message, of shape (R, T). A message may be interrupted by tokens that
    were not sampled."""
    latest = torch.cummax(messages, dim=1).values
    before = torch.nn.functional.pad(latest, (1, 0), value=NO_STEP)[:, :-1]
    return (messages != NO_STEP) & (messages > before)


def cut_before_last_step(messages: Tensor, cut: Tensor, values: Tensor, over: str) -> tuple[Tensor, Tensor]:
    """Take the last step of episodes that were cut out of them.

    Args:
        cut: which episodes were cut, of shape (R,).
        over: what a step is, as in `estimate`.

    Returns:
        The messages without it, and the bootstrap of each row, of shape (R,): the value before the step that was taken
        out; 0 where none was.
    """
    places = torch.arange(messages.size(1), device=messages.device).expand_as(messages)
    starts = first_tokens(messages) if over == TURNS else messages != NO_STEP
    last = torch.where(starts, places, NO_STEP).max(dim=1).values
    shortened = cut & (last != NO_STEP)
    left = messages.masked_fill(shortened.unsqueeze(1) & (places >= last.unsqueeze(1)), NO_STEP)
    bootstrap = values.gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1)
    return left, torch.where(shortened, bootstrap, 0.0)


def token_rewards(messages: Tensor, process: Tensor, outcome: Tensor) -> Tensor:
    """The reward of every token: `process` as it is, and the outcome at the last sampled token of its row.

    Args:
        process: of shape (R, T).
        outcome: of shape (R,).
    """
    places = torch.arange(messages.size(1), device=messages.device)
    last = torch.where(messages != NO_STEP, places, NO_STEP).max(dim=1).values
    return process + (places == last.unsqueeze(1)) * outcome.unsqueeze(1)


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Number, sum and sum of squares of the values where the mask is true: three numbers that can be added up over
    processes."""
    counted = values[mask.bool()].double()
    return torch.stack([counted.new_tensor(counted.numel()), counted.sum(), counted.square().sum()])


def mean_and_variance(summed: Tensor) -> tuple[float, float]:
    """Mean and variance of what `moments` counted; (0, 0) of nothing."""
    count, total, squares = summed.tolist()
    if count == 0:
        return 0.0, 0.0
    mean = total / count
    return mean, max(squares / count - mean * mean, 0.0)


def whitened(advantages: Tensor, mask: Tensor, summed: Tensor) -> Tensor:
    """The advantages with mean 0 and standard deviation 1 over the tokens that `summed` counts, 0 elsewhere.

    Args:
        summed: the `moments` of all processes together.
    """
    mean, variance = mean_and_variance(summed)
    return torch.where(mask.bool(), (advantages - mean) / (variance**0.5 + 1e-8), 0.0)
