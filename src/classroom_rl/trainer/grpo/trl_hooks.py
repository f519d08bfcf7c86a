"""Changes to TRL's `GRPOTrainer`: all overrides of its private methods, and all uses of its private attributes, are in
this module.

They were checked against the version in `CHECKED_AGAINST`. A test fails if a signature changes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from accelerate.utils import DistributedType
from trl import GRPOTrainer
from trl.trainer.utils import pad

from classroom_rl.config.values import BNPO
from classroom_rl.trainer.batch_builder import ROWS, ConversationRows, padded
from classroom_rl.trainer.checkpoints import EpochOrderSampler
from classroom_rl.trainer.grpo.log_probs import Cut, mask_of, pack_rows, scoring_only, split_to
from classroom_rl.trainer.grpo.mismatch import BatchMismatch, importance_ratio
from classroom_rl.trainer.grpo.row_tensors import PER_ROW_LOSSES, BatchRows, cross_entropy, flatten
from classroom_rl.trainer.sample_batch import LEFT_OUT

TokenRow = tuple[list[int], list[int]]
"""Prompt ids and completion ids."""

CHECKED_AGAINST = {"trl": "1.16.0"}
SIGNATURES = {
    "_get_train_sampler": ("dataset",),
    "_get_per_token_logps_and_entropies": (
        *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        *("compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask"),
        *("spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ),
    "_prepare_inputs": ("generation_batch",),
    "_generate_and_score_completions": ("inputs",),
    "_generate": ("prompts",),
    "_compute_loss": ("model", "inputs"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_log_metric": ("name", "value"),
}
"""The parameters of the methods that are overridden or called."""
ATTRIBUTES = (
    *("_metrics", "_last_loaded_step", "vllm_generation", "use_vllm", "reward_func_names", "_tokenizer"),
    *("current_gradient_accumulation_steps", "temperature", "loss_type", "_buffered_inputs", "num_iterations", "_step"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"),
)
"""Attributes of a `GRPOTrainer` that are read or set."""


class TrlHooks(GRPOTrainer):
    """TRL's trainer with this project's order of problems, mismatch metrics, and control of shuffled rewards.

    Attributes:
        correct_mismatch: whether the loss corrects for the difference between the engine's log-probs and the trainer's.
        shuffle_rewards: whether rewards are permuted over the batch: a control that must learn nothing.
        correction_weight: the weight of the cross-entropy of corrections in the loss.
        tokens_per_micro_batch: the most tokens of a micro-batch, padding included; None if it has a number of rows.
        needs_old_log_probs: whether the log-probs of before a batch's first step are needed by themselves.
    """

    correct_mismatch: bool
    shuffle_rewards: bool
    correction_weight: float = 0.0
    tokens_per_micro_batch: int | None = None
    needs_old_log_probs: bool = False
    _mismatch: BatchMismatch | None = None
    _micro_batches = 0
    _inputs: dict[str, Any] | None = None
    _filled: list[dict[str, Any] | None] | None = None
    _rows: BatchRows | None = None
    _logps: torch.Tensor | None = None
    _wanted: torch.Tensor | None = None
    _cut: Cut | None = None

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
        return EpochOrderSampler(sampler, lambda: self.state.global_step // self._steps_in_epoch(sampler))

    def _steps_in_epoch(self, sampler: Any) -> int:
        rows = sampler.mini_repeat_count * sampler.batch_size * self.args.steps_per_generation
        return max(len(sampler) // rows, 1)

    @property
    def _may_cut_columns(self) -> bool:
        """Whether a row's log-probs are the same in a batch of another width. They are not where the frequencies of
        rotary positions depend on the longest position."""
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
        return not any(each.get("rope_type") in ("dynamic", "longrope") for each in kinds)

    @property
    def steps_of_batch(self) -> int:
        """Optimizer steps on each batch."""
        return self.num_iterations

    def prompts_of(self, step: int) -> list[str]:
        """The prompts of this process's part of the batch that begins at an optimizer step, in TRL's order."""
        sampler = super()._get_train_sampler()
        epoch, place = divmod(step, self._steps_in_epoch(sampler))
        order = iter(EpochOrderSampler(sampler, lambda: epoch))
        batch, own = sampler.mini_repeat_count * sampler.batch_size, self.accelerator.num_processes
        repeats = self.num_iterations * self.args.steps_per_generation
        first = place // self.num_iterations * repeats * batch + self.accelerator.process_index * (batch // own)
        return [self.train_dataset[index]["prompt"] for index in islice(order, first, first + batch // own)]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's method on micro-batches that are cut to their longest row, for the tokens in `_wanted` only. Where no
        gradient is computed, there is no dropout: the engine sampled without the adapter's dropout, too."""
        wanted = attention_mask[:, -logits_to_keep:].bool() if self._wanted is None else self._wanted
        whole, order = (input_ids, attention_mask, wanted), None
        if self.tokens_per_micro_batch is not None and batch_size is not None:
            packs = self._packs(attention_mask[:, :-logits_to_keep], attention_mask[:, -logits_to_keep:])
            own = (tuple(each[pack] for each in whole) for pack in packs)
            order = torch.tensor([row for pack in packs for row in pack], device=input_ids.device).argsort()
        else:
            own = zip(*(each.split(batch_size or len(input_ids)) for each in whole), strict=True)
        with nullcontext() if torch.is_grad_enabled() else _without_dropout(self.model):
            scored = [self._score_micro_batch(model, *each, **named) for each in own]
        logps, entropies, aux_losses = zip(*scored, strict=True)
        if order is not None:
            logps, entropies = (None if each[0] is None else [torch.cat(each)[order]] for each in (logps, entropies))
            entropies = entropies or [None]
        found = torch.cat(logps)
        if torch.is_grad_enabled():
            self._logps = found  # for the cross-entropy, which needs no forward pass of its own
            if self._inputs is not None:
                self._correct_for_mismatch(found.detach(), self._inputs)
        entropy = None if entropies[0] is None else torch.cat(entropies)
        return found, entropy, None if aux_losses[0] is None else torch.stack(aux_losses).mean()

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any] | None:
        """TRL's method; with `tokens_per_micro_batch` it gives micro-batches that are filled by tokens. TRL has one
        micro-batch for each row then, of which the first are None: there are fewer than rows, and the last one must be
        real, because gradients are exchanged with it."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.loss_type == BNPO and self._buffered_inputs is not before:
            self._scale_micro_batches(self._buffered_inputs)
        if self.tokens_per_micro_batch is None:
            return inputs
        if self._buffered_inputs is not self._filled:
            self._filled = self._buffered_inputs = self._fill_by_tokens(self._buffered_inputs)
        return self._filled[self._step % self.args.steps_per_generation]

    def _fill_by_tokens(self, rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        masks = (torch.cat([row[name] for row in rows]) for name in ("prompt_mask", "completion_mask"))
        packs = self._packs(*masks)
        of_rows = [name for name, value in rows[0].items() if torch.is_tensor(value) and value.dim()]
        filled = [rows[0] | {name: torch.cat([rows[row][name] for row in pack]) for name in of_rows} for pack in packs]
        return [*[None] * (len(rows) - len(packs)), *filled]

    def _packs(self, prompt_mask: torch.Tensor, completion_mask: torch.Tensor) -> list[list[int]]:
        """The rows of each micro-batch, as many micro-batches on every rank."""
        if self._may_cut_columns:
            prompts, completions = (mask.sum(dim=1).tolist() for mask in (prompt_mask, completion_mask))
        else:
            prompts, completions = ([mask.size(1)] * len(mask) for mask in (prompt_mask, completion_mask))
        packs = pack_rows(prompts, completions, self.tokens_per_micro_batch)
        counts = self.accelerator.gather(torch.tensor([len(packs)], device=prompt_mask.device))
        return split_to(packs, int(counts.max()))

    @property
    def _scores_once(self) -> bool:
        """Whether the log-probs of the loss are those of before the step: there is one step on a batch, and no dropout.
        Then no forward pass is needed for the old log-probs, and their ratio to the new ones is 1."""
        if self.needs_old_log_probs or self.num_iterations > 1 or _has_dropout(self.model):
            return False
        return self.args.gradient_accumulation_steps % self.args.steps_per_generation == 0

    @contextmanager
    def _old_log_probs(self, wanted: bool) -> Iterator[None]:
        """Inside, TRL computes old log-probs, and the ratios to the engine's, only if they are wanted."""
        self.vllm_importance_sampling_correction = wanted
        try:
            yield
        finally:
            self.vllm_importance_sampling_correction = True

    def _correct_for_mismatch(self, logps: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Give a micro-batch the ratio that TRL's loss multiplies by."""
        mask, sampled = inputs["completion_mask"] * inputs["tool_mask"], inputs["sampling_per_token_logps"]
        mode, most = self.vllm_importance_sampling_mode, self.vllm_importance_sampling_clip_max
        ratio = importance_ratio(logps, sampled, mask, mode, most)
        self._mismatch.add(logps, sampled, mask, ratio)
        inputs["importance_sampling_ratio"] = ratio if self.correct_mismatch else torch.ones_like(ratio)

    def _end_micro_batch(self) -> None:
        """Log the mismatch after the last micro-batch of a batch, if the loss measures it."""
        self._micro_batches += 1
        if self._mismatch is not None and self._micro_batches == self.args.steps_per_generation:
            for name, figure in self._mismatch.figures(self.accelerator.gather).items():
                self._metrics["train"][name].append(figure)

    @contextmanager
    def _scoring(self, wanted: torch.Tensor | None, inputs: dict[str, Any] | None = None) -> Iterator[None]:
        """Inside, only the tokens in a mask of shape (rows, completion) get a log-prob; all do if it is None. A
        micro-batch that is given gets its ratio to the engine with them."""
        self._wanted, self._inputs = wanted, inputs
        try:
            yield
        finally:
            self._wanted = self._inputs = None

    def _score_micro_batch(
        self, model: Any, ids: torch.Tensor, attention: torch.Tensor, wanted: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Log-probs and entropies of shape (rows, completion), with 0 for tokens that are not wanted, and the loss that
        balances experts."""
        cut = self._cut = Cut.of(attention, wanted, columns=self._may_cut_columns)
        wanted = cut.apply_right(wanted)
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
            scoring_only(model, wanted), cut.apply(ids), cut.apply(attention), wanted.size(1), **named
        )
        return cut.undo_right(logps), None if entropies is None else cut.undo_right(entropies), aux_loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's method, which also logs the mismatch, and corrects for it only if `correct_mismatch` is set; if scoring
        once is enough, the loss does both. TRL's own metrics of its reward functions are dropped: they are those of the
        whole reward, which it logs as `reward`."""
        self._mismatch, self._micro_batches = BatchMismatch() if self._scores_once else None, 0
        with self._scoring(None), self._old_log_probs(self._mismatch is None):  # `_generate` says which tokens
            output = super()._generate_and_score_completions(inputs)
        if self._rows is not None:
            output |= self._tensors_of_rows(self._rows, output)
        mask = output["completion_mask"] * output["tool_mask"]
        output["row_scale"] = self._row_scale(mask)
        for name in self.reward_func_names:
            for figure in ("mean", "std"):
                self._metrics["train"].pop(f"rewards/{name}/{figure}")
        if self._mismatch is not None:
            return output
        self._measure_mismatch(output["old_per_token_logps"], output["sampling_per_token_logps"], mask)
        if not self.correct_mismatch:
            output["importance_sampling_ratio"] = torch.ones_like(output["importance_sampling_ratio"])
        return output

    def _generate(self, prompts: list[Any]) -> tuple:
        """TRL's method, with the rows beside the conversations appended to its lists of tokens. TRL's own metrics are
        of the conversations alone."""
        ids, completions, mask, texts, logprobs, extra, images, tool_images = super()._generate(prompts)
        left_out = extra.pop(LEFT_OUT)  # only now: TRL's metrics count these conversations, too
        self._rows, planned = None, self._pop_rows(extra)
        if planned is not None:
            beside, owners = flatten(planned)
            left_out = [*left_out, *(left_out[owner] for owner in owners)]
            parts, pad = self.args.steps_per_generation, self._tokenizer.pad_token_id
            own = padded(beside, len(planned), parts, self.accelerator, pad)
            self._rows = BatchRows(planned, own, [*owners, *[None] * (len(own) - len(owners))])
            ids = [*ids, *(each.row.prompt_ids for each in own)]
            completions = [*completions, *(each.row.completion_ids for each in own)]
            mask = [*mask, *(each.row.mask for each in own)]
            left_out += [False] * (len(own) - len(owners))
            logprobs = [*logprobs, *(each.row.logprobs for each in own)]
        mask = [[0] * len(row) if out else row for row, out in zip(mask, left_out, strict=True)]
        self._wanted = mask_of(mask, self.accelerator.device)
        if self._rows is not None:
            self._wanted |= self._rows.targets(self._wanted.size(1), self.accelerator.device).bool()
        return ids, completions, mask, texts, logprobs, extra, images, tool_images

    def _pop_rows(self, extra: dict[str, Any]) -> Sequence[ConversationRows] | None:
        """Take the rows beside the conversations out of the rollout's columns; None if this training has none."""
        return extra.pop(ROWS, None)

    def _tensors_of_rows(self, rows: BatchRows, output: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The advantage of every token, and what the cross-entropy needs: its targets, and their number over all
        ranks."""
        length, advantages = output["completion_ids"].size(1), output["advantages"]
        targets = rows.targets(length, advantages.device)
        items = self.accelerator.gather(targets.sum().unsqueeze(0)).sum()
        tensors = {"advantages": rows.advantages(advantages, length)}
        if items > 0:
            tensors |= {"correction_targets": targets, "correction_items": items}
            self._metrics["train"]["corrections/rows"].append(self._correction_rows(targets))
        return tensors

    def _row_scale(self, mask: torch.Tensor) -> torch.Tensor:
        """How many rows there are for each with a token that is trained on, over all ranks."""
        counts = torch.tensor([len(mask), mask.any(dim=1).sum()], device=mask.device)
        everything, trained = self.accelerator.gather(counts.unsqueeze(0)).sum(dim=0)
        return everything / trained.clamp(min=1)

    def _scale_micro_batches(self, batch: Sequence[dict[str, Any]]) -> None:
        """With a loss that is a mean over micro-batches: how many there are for each that is trained on."""
        trained = torch.stack([(each["completion_mask"] * each["tool_mask"]).any() for each in batch])
        scale = self._row_scale(trained.unsqueeze(1))
        for each in batch:
            each["row_scale"] = scale

    def _correction_rows(self, targets: torch.Tensor) -> float:
        return self.accelerator.gather(targets.any(dim=1).sum().unsqueeze(0)).sum().item()

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss on what the policy sampled, plus the weighted cross-entropy of the corrections, each divided by
        the number of its own tokens (or rows): more corrections do not thin out the rest. A micro-batch without rows
        has a loss of 0, which no weight has a part in."""
        loss = self._loss_of_micro_batch(model, inputs)
        self._end_micro_batch()
        return loss

    def _loss_of_micro_batch(self, model: Any, inputs: dict[str, Any] | None) -> torch.Tensor:
        if inputs is None:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        wanted = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        if "correction_targets" in inputs:
            wanted |= inputs["correction_targets"].bool()
        with self._scoring(wanted, None if self._mismatch is None else inputs):
            loss = super()._compute_loss(model, inputs)
        if self.tokens_per_micro_batch is not None and self.loss_type in PER_ROW_LOSSES:
            loss = loss * len(wanted)  # TRL took the mean over these rows, and divides by the number of all
        if self.loss_type in (*PER_ROW_LOSSES, BNPO):
            loss = loss * inputs["row_scale"]
        if "correction_targets" not in inputs:
            return loss
        summed = cross_entropy(self._logps, inputs["correction_targets"], self.temperature)
        parts = self.args.steps_per_generation
        mean = summed * self.accelerator.num_processes / inputs["correction_items"]
        logged = self.accelerator.reduce(mean.detach(), reduction="mean") * parts / self.temperature
        self._metrics["train"]["corrections/ce_loss"].append(logged.item())
        steps_in_batch = parts / self.current_gradient_accumulation_steps
        return loss + self.correction_weight * mean * steps_in_batch

    def score(self, rows: Sequence[TokenRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-prob of every completion token of (prompt ids, completion ids), and a mask of those that are no
        padding; both of shape (rows, longest completion). A row without completion is padding."""
        pad_id, device = self._tokenizer.pad_token_id, self.accelerator.device
        prompts = [torch.tensor(prompt or [pad_id]) for prompt, _ in rows]
        completions = [torch.tensor(completion or [pad_id]) for _, completion in rows]
        lengths = torch.tensor([len(completion) for _, completion in rows], device=device)
        ids, attention = (
            torch.cat([pad(left, padding_value=value, padding_side="left"), pad(right, padding_value=value)], dim=1).to(
                device
            )
            for left, right, value in (
                (prompts, completions, pad_id),
                ([torch.ones_like(each) for each in prompts], [torch.ones_like(each) for each in completions], 0),
            )
        )
        length = max(len(each) for each in completions)
        logps, *_ = self._get_per_token_logps_and_entropies(self.model_wrapped, ids, attention, length)
        return logps, torch.arange(length, device=device) < lengths.unsqueeze(1)

    def own_rows(self) -> tuple[list[TokenRow], list[list[int]]]:
        """Rows of the last batch that the policy sampled tokens of, as (prompt ids, completion ids), and the mask of
        those in each completion: those of the first micro-batch with any, `train.per_device_train_batch_size` at most,
        because a micro-batch can have many more, where an episode is many rows. Without any, one row of padding:
        all ranks score together."""
        most = self.args.per_device_train_batch_size
        masks = [each["completion_mask"] * each["tool_mask"] for each in self._buffered_inputs]
        place = next((place for place, mask in enumerate(masks) if mask.any()), None)
        if place is None:
            return [([], [])], [[0]]
        batch, sampled = self._buffered_inputs[place], masks[place]
        chosen = sampled.any(dim=1).nonzero().flatten()[:most]
        sampled = sampled[chosen]
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        rows = [
            (prompt[kept.bool()].tolist(), completion[there.bool()].tolist())
            for prompt, kept, completion, there in zip(*(batch[name][chosen] for name in names), strict=True)
        ]
        lengths = [len(completion) for _, completion in rows]
        return rows, [mask[:length].tolist() for mask, length in zip(sampled, lengths, strict=True)]

    def backward_and_step(self, loss: torch.Tensor) -> None:
        """One optimizer step on a loss, beside those of the training: no counter of steps moves."""
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
        if self.args.max_grad_norm > 0:
            self.accelerator.clip_grad_norm_(self.model_wrapped.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.model_wrapped.zero_grad()

    def log_figure(self, name: str, value: float) -> None:
        """Log a figure, which all processes know, with this step's."""
        self._metrics["train"][name].append(value)

    def _measure_mismatch(self, trained: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> None:
        """Log how far the trainer's log-probs are from the engine's; TRL logs the ratios and the largest difference."""
        batch = BatchMismatch()
        batch.add(trained, sampled, mask, torch.ones_like(trained))
        for name, figure in batch.figures(self.accelerator.gather).items():
            if name.startswith("mismatch/"):
                self._metrics["train"][name].append(figure)

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """TRL's method; with `shuffle_rewards`, the rewards are permuted over the batch."""
        rewards = super()._calculate_rewards(*arguments, **named)
        if not self.shuffle_rewards:
            return rewards
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        return rewards[torch.randperm(len(rewards), generator=generator)]


def _has_dropout(model: torch.nn.Module) -> bool:
    modules = any(isinstance(each, torch.nn.Dropout) and each.p > 0 for each in model.modules())
    return modules or getattr(model.config.get_text_config(), "attention_dropout", 0.0) > 0


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
