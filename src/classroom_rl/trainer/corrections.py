"""Supervised passes over corrections between two steps of a training.

A pass uses the training's own optimizer, at a learning rate of its own. It stops when the policy has moved too far on
tokens that it sampled itself, and leaves the schedule of the learning rate as it was.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from classroom_rl.config.train_rl import CorrectionsConfig, TrainRLConfig, pass_batch_size
from classroom_rl.config.values import CHANGED
from classroom_rl.results.corrections import Correction
from classroom_rl.rollout.rows import CORRECTION, TrainingRow
from classroom_rl.trainer.batch import Batch, Sample
from classroom_rl.trainer.log_probs import log_probs, without_dropout
from classroom_rl.trainer.loop import TrainingLoop
from classroom_rl.trainer.losses import approximate_kl

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassResult:
    """What a pass did.

    Attributes:
        examples: the number of corrections trained on, over all epochs; each counts once in an epoch.
        steps: optimizer steps.
        first_loss, last_loss: the mean cross-entropy per token, in nats, of the first and the last step.
        kl: how far the policy moved on its own tokens, in nats per token.
        stopped: whether `max_kl` ended the pass early.
    """

    examples: int
    steps: int
    first_loss: float
    last_loss: float
    kl: float
    stopped: bool


def run_pass(
    loop: TrainingLoop, corrections: Sequence[Correction], options: CorrectionsConfig, batch: int, seed: int
) -> PassResult:
    """Train on all corrections, the same number of rows on every process; all processes call this together.

    Args:
        batch: the rows of each process in one optimizer step.
    """
    sampled = sampled_rows(loop)
    logps_before = _scored(loop, sampled)
    losses: list[float] = []
    examples, kl, stopped = 0, 0.0, False
    with learning_rate(loop, options.learning_rate):
        for share in _batches(corrections, options.epochs, batch * loop.accelerator.num_processes, seed):
            losses.append(_train_on(loop, share, options))
            examples += len(share)
            kl = _moved(loop, logps_before, sampled)
            if kl > options.max_kl:
                stopped = True
                break
    return PassResult(examples, len(losses), losses[0], losses[-1], kl, stopped)


def sampled_rows(loop: TrainingLoop) -> Batch:
    """Samples of the last batch with tokens that the policy sampled: those of the first micro-batch with any,
    `train.per_device_train_batch_size` at most, because a micro-batch can have many more. Without any, one with nothing
    in it: all processes score together."""
    for micro in loop.micro_batches:
        rows = micro.mask_BT.any(dim=1).nonzero().flatten().tolist()
        if rows:
            return micro.take(rows[: loop.args.per_device_train_batch_size])
    return loop.micro_batches[0].take([])


def _batches(corrections: Sequence[Correction], epochs: int, size: int, seed: int) -> Iterator[list[Correction]]:
    for epoch in range(epochs):
        order = list(corrections)
        random.Random(f"{seed}|{epoch}").shuffle(order)
        for start in range(0, len(order), size):
            yield order[start : start + size]


def _train_on(loop: TrainingLoop, share: Sequence[Correction], options: CorrectionsConfig) -> float:
    """One optimizer step; returns the mean cross-entropy per token. Each correction is on exactly one process."""
    accelerator = loop.accelerator
    own_corrections = share[accelerator.process_index :: accelerator.num_processes]
    micro = _as_batch(own_corrections, options.targets == CHANGED, loop)
    scores = log_probs(loop.model_wrapped, micro, micro.target_BT, accelerator, loop.padding)
    tokens = accelerator.reduce(micro.target_BT.sum(), reduction="sum").clamp(min=1)
    summed = -torch.where(micro.target_BT, scores.logps_BT, 0.0).sum()
    # Gradients are averaged over processes, and those of log-probs have 1/temperature in them: both are undone.
    _optimizer_step(loop, summed * loop.temperature * accelerator.num_processes / tokens)
    return (accelerator.reduce(summed.detach(), reduction="sum") / tokens).item()


def _optimizer_step(loop: TrainingLoop, loss: torch.Tensor) -> None:
    """One optimizer step on a loss: no counter of steps and no schedule moves. Gradients must be zero, and are again
    afterwards."""
    loop.accelerator.sync_gradients = True
    loop.backward(loss)
    if loop.args.max_grad_norm > 0:
        loop.accelerator.clip_grad_norm_(loop.model_wrapped.parameters(), loop.args.max_grad_norm)
    loop.optimizer.step()
    loop.model_wrapped.zero_grad()


def _as_batch(corrections: Sequence[Correction], changed_only: bool, loop: TrainingLoop) -> Batch:
    """Corrections as a micro-batch; without any, one with nothing to train on."""
    pad_id = loop.processing_class.pad_token_id
    samples = []
    for correction in corrections:
        start, length = correction.unchanged if changed_only else 0, len(correction.target_ids)
        target_mask, zeros = [0] * start + [1] * (length - start), [0] * length
        prompt = correction.prompt_ids or [pad_id]
        row = TrainingRow(
            "", CORRECTION, None, prompt, correction.target_ids, zeros, target_mask, [0.0] * length, zeros
        )
        samples.append(Sample(row, [0.0] * length))
    if not samples:
        samples = [Sample(TrainingRow("", CORRECTION, None, [pad_id], [pad_id], [0], [0], [0.0], [0]), [0.0])]
    return Batch.of(samples, pad_id, loop.accelerator.device)


@torch.no_grad()
def _scored(loop: TrainingLoop, batch: Batch) -> torch.Tensor:
    """The log-probs of what the policy sampled."""
    with without_dropout(loop.model):
        scores = log_probs(loop.model_wrapped, batch, batch.mask_BT, loop.accelerator, loop.padding)
    return scores.logps_BT[batch.mask_BT]


def _moved(loop: TrainingLoop, before: torch.Tensor, batch: Batch) -> float:
    """The k3 estimate of KL(before ‖ now) per token (Schulman, "Approximating KL divergence", 2020), over all
    processes."""
    kl = approximate_kl(_scored(loop, batch), before)
    sums = torch.stack([kl.sum(), kl.new_tensor(float(kl.numel()))])
    total, count = loop.accelerator.reduce(sums, reduction="sum")
    return (total / count.clamp(min=1)).item()


@contextmanager
def learning_rate(trainer: Trainer, rate: float | None) -> Iterator[None]:
    """Another learning rate for the optimizer; afterwards rate and schedule are as before. None changes neither."""
    groups = trainer.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    state = schedule.state_dict() if schedule is not None else None
    try:
        for group in groups:
            group["lr"] = group["lr"] if rate is None else rate
        yield
    finally:
        if state is not None:
            schedule.load_state_dict(state)
        for group, original_rate in zip(groups, rates, strict=True):
            group["lr"] = original_rate


class CorrectionPasses(TrainerCallback):
    """Runs a pass every `interval` optimizer steps, at the end of a batch, if enough corrections wait."""

    def __init__(self, loop: TrainingLoop, config: TrainRLConfig):
        train = config.train
        self._loop, self._corrections, self._options = loop, loop.corrections, train.corrections
        self._batch, self._seed = pass_batch_size(train), config.seed
        self._interval = -(-train.corrections.interval // train.mu) * train.mu

    @property
    def _rate(self) -> float:
        """The learning rate of a pass that runs now."""
        configured = self._options.learning_rate
        return self._loop.optimizer.param_groups[0]["lr"] if configured is None else configured

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Run a pass if one is due."""
        if state.global_step % self._interval:
            return
        corrections = self._corrections.waiting(self._loop.accelerator)
        if len(corrections) < self._options.min_examples:
            logger.info(
                "no supervised pass: %d corrections wait, %d are needed", len(corrections), self._options.min_examples
            )
            return
        if self._rate == 0:
            logger.info(
                "no supervised pass: %d corrections wait, but the learning rate has fallen to 0", len(corrections)
            )
            return
        seed = self._seed + state.global_step
        replay_count = round(self._options.replay * len(corrections))
        corrections += self._corrections.earlier(self._loop.accelerator, replay_count, seed)
        result = run_pass(self._loop, corrections, self._options, self._batch, seed)
        self._corrections.passed(state.global_step, result.examples)
        figures = {
            "corrections/pass_examples": result.examples,
            "corrections/pass_loss": result.last_loss,
            "corrections/pass_first_loss": result.first_loss,
            "corrections/pass_kl": result.kl,
        }
        self._loop.keep_figures(figures)
        logger.info(
            "supervised pass %d: %d examples in %d steps, cross-entropy %.3f to %.3f nats per token, KL %.4f%s",
            self._corrections.cursor.passes,
            result.examples,
            result.steps,
            result.first_loss,
            result.last_loss,
            result.kl,
            f", stopped: above train.corrections.max_kl={self._options.max_kl:g}" if result.stopped else "",
        )
