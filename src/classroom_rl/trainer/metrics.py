"""Figures of training steps for the log: added up over micro-batches and processes, under the names that TRL's users
know."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from classroom_rl.config.base import default_penalties
from classroom_rl.config.values import SUPERVISOR_REWARD
from classroom_rl.results.supervision_summary import reviewed_messages
from classroom_rl.rollout.rows import message_numbers
from classroom_rl.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def means_over_processes(figures: Mapping[str, float]) -> dict[str, float]:
    """The mean of each figure over the processes that have it; all processes call this together."""
    gathered = gather_object([figures])
    names = dict.fromkeys(name for figures in gathered for name in figures)
    return {name: fmean(figures[name] for figures in gathered if name in figures) for name in names}


class TokenMeans:
    """Means over the tokens of a whole pass over a batch, from all processes."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, per_token_BT: Tensor, mask_BT: Tensor) -> None:
        """Add a micro-batch's tokens; all processes add the same names in the same order."""
        total = torch.where(mask_BT, per_token_BT.detach().float(), 0.0).sum()
        pair = torch.stack([total, mask_BT.sum().to(total.dtype)]).double()
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """The means by name; those of no token are left out. All processes call this together."""
        if not self._sums:
            return {}
        sums = accelerator.reduce(torch.stack([*self._sums.values()]).float(), reduction="sum").tolist()
        return {name: total / count for name, (total, count) in zip(self._sums, sums, strict=True) if count}


class MismatchFigures:
    """The difference Δ between the trainer's log-probs and the engine's on the tokens that the policy sampled, over all
    micro-batches of a batch."""

    def __init__(self) -> None:
        self._deltas: list[Tensor] = []
        self._ratios: list[Tensor] = []

    def add(self, trained_BT: Tensor, sampled_BT: Tensor, mask_BT: Tensor, ratio: Tensor) -> None:
        """Add a micro-batch: the arguments of `losses.importance_ratio`, and what it gave."""
        self._deltas.append((trained_BT - sampled_BT)[mask_BT & ~torch.isnan(sampled_BT)])
        self._ratios.append(ratio[mask_BT] if ratio.shape == mask_BT.shape else ratio[mask_BT.any(dim=1)].flatten())

    def figures(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """By name in the log: the mean and largest |Δ|, the k3 estimate of KL(engine ‖ trainer) (Schulman,
        "Approximating KL divergence", 2020), and the ratios, over all processes, which call this together.

        Args:
            gather: gives the rows that all processes gave.
        """
        delta, ratio = torch.cat(self._deltas), torch.cat(self._ratios)
        k3 = torch.exp(delta) - 1 - delta
        counts = [delta.new_tensor(float(tensor.numel())) for tensor in (delta, ratio)]
        sums = torch.stack([delta.abs().sum(), k3.sum(), ratio.sum(), *counts])
        absolute, k3_sum, ratios, of_deltas, of_ratios = gather(sums.unsqueeze(0)).sum(dim=0).tolist()
        extremes = (
            (delta.abs().max(), -ratio.min(), ratio.max()) if delta.numel() else 3 * (delta.new_tensor(-torch.inf),)
        )
        largest, least, most = gather(torch.stack(extremes).unsqueeze(0)).amax(dim=0).tolist()
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


def end_ids(model: Any, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens that may end what a model writes; padding counts as one, as in TRL."""
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return [*eos_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]


def completion_figures(
    records: Sequence[Trajectory], end_ids: Sequence[int], accelerator: Accelerator
) -> dict[str, float]:
    """TRL's figures of the sampled tokens of each episode, and `batch_tokens`, the tokens of prompts and samples; all
    processes call this together.

    Args:
        end_ids: the tokens that end a message. An episode whose last token is none of them counts as clipped.
    """
    rows = [
        [
            sum(record.mask),
            len(record.prompt_ids),
            float(bool(record.completion_ids) and record.completion_ids[-1] in end_ids),
        ]
        for record in records
    ]
    sampled, prompts, ended = accelerator.gather(torch.tensor(rows, device=accelerator.device).float()).T
    terminated = sampled[ended.bool()] if ended.any() else torch.zeros(1)
    return {
        "batch_tokens": (sampled.sum() + prompts.sum()).item(),
        "completions/mean_length": sampled.mean().item(),
        "completions/min_length": sampled.min().item(),
        "completions/max_length": sampled.max().item(),
        "completions/clipped_ratio": 1 - ended.mean().item(),
        "completions/mean_terminated_length": terminated.mean().item(),
        "completions/min_terminated_length": terminated.min().item(),
        "completions/max_terminated_length": terminated.max().item(),
    }


def supervision_metrics(records: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of valid and unreviewed messages, of categories, retries and replacements, the mean process reward, and
    the messages per dialogue (penalties reward ending early: watch it); empty for a batch without reviews."""
    turns = [record.turns[index] for record in records for index in message_numbers(record)]
    reviews = [review for turn in turns for _, review in reviewed_messages(turn)]
    if not reviews:
        return {}
    known = [review for review in reviews if review.valid is not None]
    metrics = {
        "supervision/reviewed_share": len(known) / len(reviews),
        "supervision/no_verdict_share": 1 - len(known) / len(reviews),
        "supervision/messages_per_dialogue": len(turns) / len(records),
        "supervision/replaced_share": fmean(turn.replaced for turn in turns),
        "supervision/retried_share": fmean(bool(turn.drafts) and not turn.replaced for turn in turns),
        "supervision/corrections": sum(review.correction is not None for review in reviews) / len(records),
        "supervision/refused_corrections": fmean(review.refused_correction is not None for review in reviews),
    }
    if known:
        metrics["supervision/valid_share"] = fmean(review.valid for review in known)
        category_counts = Counter(review.category for review in known if not review.valid)
        for category in dict.fromkeys([*default_penalties(), *category_counts]):
            metrics[f"supervision/category/{category}"] = category_counts[category] / len(known)
    means = [fmean(values) for record in records if (values := _penalties(record))]
    if means:
        metrics["supervision/process_reward"] = fmean(means)
    return metrics


def _penalties(record: Trajectory) -> list[float]:
    return [value for value in record.turn_rewards.get(SUPERVISOR_REWARD, []) if value is not None]
