"""The losses of all algorithms: pure functions of tensors, with the formulas of their papers.

Shapes: B is the number of samples of a micro-batch, T the longest completion in tokens, S is T or 1: one number for
each token, or one for each sample.

A policy loss gives a number for each token; `reduced` adds these up over a micro-batch, and what they are divided by
are numbers of the whole batch over all processes (`Totals`). So a token counts the same whatever micro-batch, process
or length of sample it is in, but for `bnpo`, whose definition is a mean over micro-batches.

A loss of your own is a function with the arguments of `clipped` and its result, named in `train.loss_type` as
`package.module:function`; it is a mean over tokens, as that of `dapo`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from classroom_rl.config.values import BNPO, FORWARD, REVERSE, Divergence
from classroom_rl.system.functions import function_of
from classroom_rl.trainer.batch import Totals

LN_2 = math.log(2)


@dataclass(frozen=True)
class LossOptions:
    """The constants of the policy losses.

    Attributes:
        epsilon_low, epsilon_high: how far the ratio π/π_old may be from 1 below and above; for `cispo`, `epsilon_high`
            is the largest ratio.
        temperature_pos, temperature_neg: how fast SAPO's soft gate closes for positive and for negative advantages.
        max_completion_length: what `dr_grpo` divides by, in tokens.
    """

    epsilon_low: float
    epsilon_high: float
    max_completion_length: int = 1
    temperature_pos: float = 1.0
    temperature_neg: float = 1.05


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, LossOptions], Tensor]


def clipped(
    logps_BT: Tensor, old_logps_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, options: LossOptions
) -> Tensor:
    """−min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A) with ρ = π/π_old (Schulman et al. 2017, "Proximal policy optimization
    algorithms", equation 7; ε_high of its own: Yu et al. 2025, "DAPO", equation 10).

    Args:
        logps_BT, old_logps_BT: the log-probs under the policy that is trained, and before the first step on the batch.
        advantages_BT: the advantage of every token.
        mask_BT: the tokens that count; what is returned elsewhere is not used.

    Returns:
        The loss of every token, of shape (B, T).
    """
    ratio_BT = torch.exp(logps_BT - old_logps_BT)
    clipped_ratio_BT = ratio_BT.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    return -torch.min(ratio_BT * advantages_BT, clipped_ratio_BT * advantages_BT)


def cispo(
    logps_BT: Tensor, old_logps_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, options: LossOptions
) -> Tensor:
    """−sg(min(ρ, ε_high)) · A · ln π: every token keeps its gradient, its weight is bounded (MiniMax 2025,
    "MiniMax-M1"). Arguments and result as for `clipped`."""
    weight_BT = torch.exp(logps_BT - old_logps_BT).clamp(max=options.epsilon_high).detach()
    return -weight_BT * advantages_BT * logps_BT


def sapo(
    logps_BT: Tensor, old_logps_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, options: LossOptions
) -> Tensor:
    """−(4/τ) σ(τ(ρ − 1)) · A, with τ by the sign of A: a soft gate in place of the clip (Gao et al. 2025, "Soft
    adaptive policy optimization"). Arguments and result as for `clipped`."""
    ratio_BT = torch.exp(logps_BT - old_logps_BT)
    tau_BT = torch.where(advantages_BT > 0, options.temperature_pos, options.temperature_neg)
    return -torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT * advantages_BT


ROWS, ROW_LENGTHS, MICRO_BATCHES, TOKENS = "rows", "row lengths", "micro-batches", "tokens"

POLICY_LOSSES: dict[str, tuple[PolicyLoss, str]] = {
    "grpo": (clipped, ROWS),  # Shao et al. 2024, "DeepSeekMath", equation 3
    BNPO: (clipped, MICRO_BATCHES),
    "dr_grpo": (clipped, ROW_LENGTHS),  # Liu et al. 2025, "Understanding R1-Zero-like training"
    "dapo": (clipped, TOKENS),  # Yu et al. 2025, "DAPO", equation 8
    "cispo": (cispo, TOKENS),
    "sapo": (sapo, ROWS),
}
"""By the name in `train.loss_type`: the loss of a token, and what its mean is taken over."""


def policy_loss_of(name: str) -> tuple[PolicyLoss, str]:
    """The loss of a token by its name, and what its mean is taken over.

    Raises:
        ConfigError: if there is none.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    return function_of("train.loss_type", name, POLICY_LOSSES), TOKENS


def reduced(
    per_token_BT: Tensor, mask_BT: Tensor, mean_over: str, totals: Totals, max_completion_length: int
) -> Tensor:
    """A micro-batch's share in the mean over the whole batch.

    - rows: the mean over samples of the mean over their tokens.
    - row lengths: the sum over tokens, divided by samples × the longest completion that is allowed.
    - micro-batches: the mean over micro-batches of the mean over their tokens.
    - tokens: the mean over tokens.
    """
    summed_B = torch.where(mask_BT, per_token_BT, 0.0).sum(dim=1)
    if mean_over == ROWS:
        return (summed_B / mask_BT.sum(dim=1).clamp(min=1)).sum() / totals.rows
    if mean_over == ROW_LENGTHS:
        return summed_B.sum() / (totals.rows * max_completion_length)
    if mean_over == MICRO_BATCHES:
        return summed_B.sum() / mask_BT.sum().clamp(min=1) / totals.micro_batches
    return summed_B.sum() / totals.tokens


def is_clipped(
    logps_BT: Tensor, old_logps_BT: Tensor, advantages_BT: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Whether clipping takes the gradient of a token away, below and above: its ratio has left the interval in the
    direction in which its advantage pushes."""
    ratio_BT = torch.exp(logps_BT - old_logps_BT)
    below = (ratio_BT < 1 - options.epsilon_low) & (advantages_BT < 0)
    return below, (ratio_BT > 1 + options.epsilon_high) & (advantages_BT > 0)


def importance_ratio(trained_BT: Tensor, sampled_BT: Tensor, mask_BT: Tensor, mode: str, most: float) -> Tensor:
    """The ratio of the trainer's probabilities to the engine's, by which a loss is multiplied (Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training").

    Args:
        trained_BT, sampled_BT: the log-probs. A token without an engine's log-prob (NaN) has the ratio 1.
        mode: `token_…` or `sequence_…`, for the ratios of tokens or of whole samples; those above `most` become `most`
            with `…_truncate`, and 0 with `…_mask`.

    Returns:
        The ratios, of shape (B, S).
    """
    log_ratio = torch.nan_to_num((trained_BT - sampled_BT) * mask_BT, nan=0.0)
    if mode.startswith("sequence_"):
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    ratio = torch.exp(log_ratio)
    return ratio.clamp(max=most) if mode.endswith("_truncate") else ratio.masked_fill(ratio > most, 0.0)


def approximate_kl(logps_BT: Tensor, old_logps_BT: Tensor) -> Tensor:
    """The k3 estimate of KL(π_old ‖ π) from tokens that π_old sampled, in nats: ratio − 1 − ln ratio, which is never
    negative (Schulman, "Approximating KL divergence", 2020)."""
    log_ratio = logps_BT - old_logps_BT
    return torch.exp(log_ratio) - 1 - log_ratio


def at_sequence_level(logps_BT: Tensor, old_logps_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The old log-probs with which every token has the ratio of its sample, (π(y)/π_old(y))^(1/|y|). The gradient stays
    each token's own, so that tokens may have different advantages; where they have the same, it is GSPO's (Zheng et al.
    2025, "Group sequence policy optimization", equations 7 and 14)."""
    log_ratio_BT = (logps_BT - old_logps_BT).detach() * mask_BT
    mean_B1 = log_ratio_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
    return logps_BT.detach() - mean_B1


def kl_to_reference(logps_BT: Tensor, old_logps_BT: Tensor, ref_logps_BT: Tensor) -> Tensor:
    """The k3 estimate of KL(π ‖ reference) from tokens that π_old sampled, in nats, times the ratio π/π_old (DeepSeek
    2025, "DeepSeek-V3.2", section 3.1; TRL's `use_bias_correction_kl`). Without the ratio its gradient would be that of
    KL(reference ‖ π)."""
    return torch.exp(logps_BT - old_logps_BT) * approximate_kl(ref_logps_BT, logps_BT)


def divergence(logps: Tensor, strong_logps: Tensor, kl: Divergence) -> Tensor:
    """How far distributions are from those of a strong tutor, in nats; the Jensen-Shannon divergence is that with equal
    weights (Agarwal et al. 2024, "On-policy distillation of language models", section 2).

    The KLs have the terms q − p, whose sum is 0: where the distributions are equal, so is every term's gradient.

    Args:
        logps, strong_logps: over all outcomes, which are the last dimension.
    """
    q, p, log_ratio = logps.exp(), strong_logps.exp(), strong_logps - logps
    if kl == FORWARD:
        return (p * log_ratio + q - p).sum(dim=-1)
    if kl == REVERSE:
        return (p - q - q * log_ratio).sum(dim=-1)
    return (p * (LN_2 - softplus(-log_ratio)) + q * (LN_2 - softplus(log_ratio))).sum(dim=-1) / 2


def cross_entropy(logps_BT: Tensor, target_BT: Tensor, temperature: float) -> Tensor:
    """The summed cross-entropy of the targets under the policy as it is sampled, in nats.

    The log-probs are of logits that were divided by the temperature, so their gradient is 1/temperature as large; it is
    multiplied back in.
    """
    return -torch.where(target_BT, logps_BT, 0.0).sum() * temperature


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float | None) -> Tensor:
    """Half the squared error of the critic (Schulman et al. 2017, equation 9). With `clip`, the larger one of two
    errors: of the value, and of the value if it may be at most `clip` away from that before the first step on the
    batch. The clipped form is that of OpenAI's baselines; the paper has it without."""
    error = (values_BT - returns_BT).square()
    if clip is not None:
        clipped_values_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
        error = torch.max(error, (clipped_values_BT - returns_BT).square())
    return 0.5 * error


def is_value_clipped(values_BT: Tensor, old_values_BT: Tensor, clip: float | None) -> Tensor:
    """Whether a value is further from that before the first step than `clip`."""
    if clip is None:
        return torch.zeros_like(values_BT, dtype=torch.bool)
    return (values_BT - old_values_BT).abs() > clip
