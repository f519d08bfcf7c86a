"""Changes to TRL's `GRPOTrainer`: all overrides of its private methods, and all uses of its private attributes, are in
this module.

They were checked against the version in `CHECKED_AGAINST`. tests/training/test_hooks.py fails if a signature changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOTrainer

from src.training.checkpoints import EpochOrderSampler

CHECKED_AGAINST = {"trl": "1.16.0"}
SIGNATURES = {
    "_get_train_sampler": ("dataset",),
    "_get_per_token_logps_and_entropies": (
        *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        *("compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask"),
        *("spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ),
    "_generate_and_score_completions": ("inputs",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_log_metric": ("name", "value"),
}
"""The parameters of the methods that are overridden or called."""
ATTRIBUTES = ("_metrics", "_last_loaded_step", "vllm_generation", "use_vllm", "reward_func_names")
"""Attributes of a `GRPOTrainer` that are read or set."""


class TrlHooks(GRPOTrainer):
    """TRL's trainer with this project's order of problems, mismatch metrics, and control of shuffled rewards.

    Attributes:
        correct_mismatch: whether the loss corrects for the difference between the engine's log-probs and the trainer's.
        shuffle_rewards: whether rewards are permuted over the batch: a control that must learn nothing.
    """

    correct_mismatch: bool
    shuffle_rewards: bool

    def use_engine_of_server(self, publisher: Any) -> None:
        """Have TRL use the engine's log-probs, and call `publisher.sync_weights` before a batch. TRL does so only with
        `use_vllm`; if that were set before TRL's `__init__`, TRL would start its own engine."""
        self.use_vllm = True
        self.vllm_generation = publisher
        self._last_loaded_step = -1

    def record_metric(self, name: str, value: float) -> None:
        """Log a metric of this step; values are averaged over processes."""
        self._log_metric(name, value)

    def _get_train_sampler(self, dataset: Any = None) -> EpochOrderSampler:
        """TRL's sampler, with an order that depends on the epoch only."""
        sampler = super()._get_train_sampler(dataset)
        steps_in_epoch = len(sampler) // (
            sampler.mini_repeat_count * sampler.batch_size * self.args.steps_per_generation
        )
        return EpochOrderSampler(sampler, lambda: self.state.global_step // max(steps_in_epoch, 1))

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """TRL's method, but without dropout when no gradient is computed: the engine sampled without the adapter's
        dropout, too."""
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*arguments, **named)
        with _without_dropout(self.model):
            return super()._get_per_token_logps_and_entropies(*arguments, **named)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's method, which also logs the mismatch, and corrects for it only if `correct_mismatch` is set. TRL's own
        metrics of its reward functions are dropped: they are those of the whole reward, which it logs as `reward`."""
        output = super()._generate_and_score_completions(inputs)
        for name in self.reward_func_names:
            for figure in ("mean", "std"):
                self._metrics["train"].pop(f"rewards/{name}/{figure}")
        mask = output["completion_mask"] * output["tool_mask"]
        self._measure_mismatch(output["old_per_token_logps"], output["sampling_per_token_logps"], mask)
        if not self.correct_mismatch:
            output["importance_sampling_ratio"] = torch.ones_like(output["importance_sampling_ratio"])
        return output

    def _measure_mismatch(self, trained: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> None:
        """Log the difference Δ between the trainer's log-probs and the engine's on the sampled tokens: mean |Δ|, and
        the k3 estimate of KL(engine ‖ trainer) (Schulman, "Approximating KL divergence", 2020)."""
        delta = (trained - sampled)[mask.bool()]
        k3 = torch.exp(delta) - 1 - delta
        sums = torch.stack([delta.abs().sum(), k3.sum(), torch.tensor(delta.numel(), device=delta.device)])
        total = self.accelerator.gather(sums.unsqueeze(0)).sum(dim=0)
        self._metrics["train"]["mismatch/mean_abs_logprob_diff"].append((total[0] / total[2]).item())
        self._metrics["train"]["mismatch/k3_kl"].append((total[1] / total[2]).item())

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """TRL's method; with `shuffle_rewards`, the rewards are permuted over the batch."""
        rewards = super()._calculate_rewards(*arguments, **named)
        if not self.shuffle_rewards:
            return rewards
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        return rewards[torch.randperm(len(rewards), generator=generator)]


@contextmanager
def _without_dropout(model: torch.nn.Module) -> Iterator[None]:
    active = [each for each in model.modules() if isinstance(each, torch.nn.Dropout) and each.training]
    for each in active:
        each.eval()
    try:
        yield
    finally:
        for each in active:
            each.train()
