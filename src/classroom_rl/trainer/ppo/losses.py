"""The losses of PPO, and the figures that show how it goes. All are pure functions.

They return a number for each token, of shape (R, T) as in `advantages`; what is trained on is summed over the sampled
tokens of all processes, and divided by their number. Losses and clipping are those of Schulman et al. 2017, "Proximal
policy optimization algorithms" (equations 7 and 9).
"""

import torch
from torch import Tensor

from classroom_rl.trainer.ppo.advantages import mean_and_variance


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """−min(ratio · A, clip(ratio, 1 − low, 1 + high) · A), with ratio = π(token) / π_old(token).

    Args:
        logps: the log-probs of the policy under training.
        old_logps: those of the policy at the beginning of the batch.
        low, high: how far the ratio may be from 1 below and above.
    """
    ratio = torch.exp(logps - old_logps)
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def is_clipped(logps: Tensor, old_logps: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Whether clipping takes the gradient of a token away: its ratio has left the interval in the direction in which
    its advantage pushes."""
    ratio = torch.exp(logps - old_logps)
    return ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half the squared error of the critic. With `clip`, the larger one of two errors: of the value, and of the value
    if it may be at most `clip` away from that at the beginning of the batch.

    The clipped form is that of OpenAI's baselines; the paper has it without.
    """
    error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.max(error, (near - returns).square())
    return 0.5 * error


def is_value_clipped(values: Tensor, old_values: Tensor, clip: float | None) -> Tensor:
    """Whether a value is further from that at the beginning of the batch than `clip`."""
    return torch.zeros_like(values, dtype=torch.bool) if clip is None else (values - old_values).abs() > clip


def approximate_kl(logps: Tensor, old_logps: Tensor) -> Tensor:
    """The k3 estimate of KL(π_old ‖ π) from tokens that π_old sampled, in nats: ratio − 1 − ln ratio, which is never
    negative (Schulman, "Approximating KL divergence", 2020)."""
    log_ratio = logps - old_logps
    return torch.exp(log_ratio) - 1 - log_ratio


def kl_to_reference(logps: Tensor, old_logps: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(π ‖ reference) from tokens that π_old sampled, in nats, times the ratio π / π_old: as TRL's
    GRPO computes it with `use_bias_correction_kl`. Without the ratio its gradient would be that of KL(reference ‖ π).

    Args:
        reference: the log-probs of the reference model.
    """
    return torch.exp(logps - old_logps) * approximate_kl(reference, logps)


def explained_variance(of_errors: Tensor, of_returns: Tensor) -> float | None:
    """1 − Var(return − value) / Var(return): 1 for a perfect critic, 0 for one that knows only a constant, below 0 for
    one that is worse. None if all returns are equal.

    Args:
        of_errors, of_returns: the `moments` of return − value and of the returns.
    """
    _, error = mean_and_variance(of_errors)
    _, spread = mean_and_variance(of_returns)
    return None if spread <= 1e-12 else 1 - error / spread
