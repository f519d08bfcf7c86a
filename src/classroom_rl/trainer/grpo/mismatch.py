"""The difference Δ between the trainer's log-probs and the engine's on the tokens that the policy sampled: its figures
over a batch, and the ratio exp(Δ) by which the loss corrects for it."""

from collections.abc import Callable

import torch
from torch import Tensor

_SEQUENCE, _TRUNCATE = "sequence_", "_truncate"


def importance_ratio(trained: Tensor, sampled: Tensor, mask: Tensor, mode: str, most: float) -> Tensor:
    """The ratio by which a loss is multiplied, as TRL's `GRPOTrainer` computes it.

    Args:
        trained, sampled: log-probs of shape (rows, T). A token without an engine's log-prob (NaN) has the ratio 1.
        mask: 1 for tokens that the policy sampled.
        mode: `token_…` or `sequence_…`, for the ratios of tokens or of whole rows; those above `most` become `most`
            with `…_truncate`, and 0 with `…_mask`.

    Returns:
        The ratios of tokens, of shape (rows, T), or of rows, of shape (rows, 1).
    """
    difference = torch.nan_to_num((trained - sampled) * mask, nan=0.0)
    if mode.startswith(_SEQUENCE):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    return ratio.clamp(max=most) if mode.endswith(_TRUNCATE) else ratio.masked_fill(ratio > most, 0.0)


class BatchMismatch:
    """The figures of Δ over all micro-batches of a batch."""

    def __init__(self) -> None:
        self._deltas: list[Tensor] = []
        self._ratios: list[Tensor] = []

    def add(self, trained: Tensor, sampled: Tensor, mask: Tensor, ratio: Tensor) -> None:
        """Add a micro-batch: the arguments of `importance_ratio`, and what it gave."""
        wanted = mask.bool()
        self._deltas.append((trained - sampled)[wanted & ~torch.isnan(sampled)])
        self._ratios.append(ratio[wanted] if ratio.shape == wanted.shape else ratio.flatten())

    def figures(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """By name in the log: the mean and largest |Δ|, the k3 estimate of KL(engine ‖ trainer) (Schulman,
        "Approximating KL divergence", 2020), and the ratios, over all processes, which call this together.

        Args:
            gather: gives the rows that all processes gave.
        """
        delta, ratio = torch.cat(self._deltas), torch.cat(self._ratios)
        k3 = torch.exp(delta) - 1 - delta
        counts = [delta.new_tensor(float(each.numel())) for each in (delta, ratio)]
        sums = torch.stack([delta.abs().sum(), k3.sum(), ratio.sum(), *counts])
        absolute, k3_sum, ratios, of_deltas, of_ratios = gather(sums.unsqueeze(0)).sum(dim=0).tolist()
        ends = (delta.abs().max(), -ratio.min(), ratio.max()) if delta.numel() else 3 * (delta.new_tensor(-torch.inf),)
        largest, least, most = gather(torch.stack(ends).unsqueeze(0)).amax(dim=0).tolist()
        if not of_deltas:
            return {}
        return {
            "sampling/sampling_logp_difference/mean": absolute / of_deltas,
            "sampling/sampling_logp_difference/max": largest,
            "sampling/importance_sampling_ratio/min": -least,
            "sampling/importance_sampling_ratio/mean": ratios / of_ratios,
            "sampling/importance_sampling_ratio/max": most,
            "mismatch/mean_abs_logprob_diff": absolute / of_deltas,
            "mismatch/k3_kl": k3_sum / of_deltas,
        }
