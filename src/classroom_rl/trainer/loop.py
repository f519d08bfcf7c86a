"""The training loop of all algorithms.

The policy is the tutor in training, `teacher_model`; a strong tutor is one it is distilled from. One optimizer step is
one pass over a batch of episodes:

    publish the weights         so that the server's engines sample with them; held-out lessons are measured if due
    play the batch              on the server: episodes (`Trajectory`) with rewards
    samples                     of the algorithm (`grpo.py`, `ppo.py`, `online_dpo.py`): the rows to train on
    log-probs before the step   of the policy, where they are needed, of the reference, and of a strong tutor
    advantages                  of the algorithm
    for each micro-batch        log-probs, loss, backward
    optimizer step, schedule    transformers' `Trainer`; DeepSpeed steps in the last backward

With `train.mu` above 1 the next steps are further passes over the same batch, which begin with the micro-batches. A
callback makes supervised passes over corrections between the steps (`corrections.py`). `Trainer` drives the steps,
clips, schedules, logs and saves; it sees one number for each step, and only public methods of it are overridden here.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import DistributedType, set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from trl.models import get_act_offloading_ctx_manager

from classroom_rl.config.values import PASS
from classroom_rl.errors import PolicyMismatch
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.batch import Batch, Totals, divide, totals
from classroom_rl.trainer.callbacks import show_conversations
from classroom_rl.trainer.correction_set import CorrectionSet
from classroom_rl.trainer.distillation import StrongTutor
from classroom_rl.trainer.group_variance import PlayedBatch
from classroom_rl.trainer.grpo import GRPO
from classroom_rl.trainer.held_out_evaluation import HeldOutEvaluation, measure_held_out
from classroom_rl.trainer.log_probs import has_dropout, log_probs, log_probs_of_batch, padding_of
from classroom_rl.trainer.metrics import completion_figures, end_ids, means_over_processes
from classroom_rl.trainer.model_loading import Policy, accumulate_in_float32
from classroom_rl.trainer.sample_batch import BatchPlayer
from classroom_rl.trainer.session import TrainingSession
from classroom_rl.trainer.trainer_hooks import AtomicCheckpoints, ResumedTrainer
from classroom_rl.trainer.weight_publisher import WeightPublisher

logger = logging.getLogger(__name__)
_ATTEMPTS_AT_A_BATCH = 3


class TrainingLoop(AtomicCheckpoints, ResumedTrainer):
    """Trains a policy on the episodes of a server.

    Args:
        session: the configuration, the problems, the server and the run folder.
        policy: the model that is trained, its tokenizer, the reference, and a strong tutor.
        algorithm: `GRPO`, or its subclass `PPO` or `OnlineDPO`.

    Attributes:
        run_config, contents, has_adapter: of the training, for `AtomicCheckpoints`.
        publisher: publishes the weights.
        player: has the server play the batches.
        reference: makes a context in which the reference's log-probs are computed; None for a loss without one.
        strong_tutor: whom the policy is distilled from; None without one.
        held_out: measures the policy on held-out lessons; None without evaluations.
        corrections: the supervisor's corrections; None without a supervisor.
        temperature: of the sampling, by which the policy divides its logits; for `corrections.py`.
        padding: how the padding of micro-batches is computed, or left out.
        micro_batches: of the batch that is trained on.
    """

    def __init__(self, session: TrainingSession, policy: Policy, algorithm: GRPO, arguments: TrainingArguments):
        config = self.run_config = session.config
        self.contents, self.has_adapter = session.contents, config.policy_model.adapter is not None
        self.algorithm, self.temperature = algorithm, config.policy_model.vllm.temperature
        self.player, self.publisher = BatchPlayer(session), WeightPublisher(session)
        self.held_out = HeldOutEvaluation(session, self.player) if config.evaluation.every else None
        if self.held_out is not None and config.evaluation.keep_best:
            self.best_step = self.held_out.best_step
        super().__init__(model=policy.model, args=arguments, processing_class=policy.tokenizer)
        offloads = config.train.activation_offloading
        self._offloads = get_act_offloading_ctx_manager(self.model) if offloads else nullcontext()
        self._always_syncs = self.is_deepspeed_enabled  # which adds up the gradients of micro-batches itself
        if config.train.grad_accum_fp32:
            accumulate_in_float32(self.accelerator)
            # Its gradients are added up in float32 once they are reduced, and in the weights' dtype before that.
            self._always_syncs |= self.accelerator.distributed_type == DistributedType.FSDP
        self.reference = policy.prepare_reference(self.accelerator)
        self.strong_tutor = StrongTutor.of(config, policy, self.accelerator)
        algorithm.prepare_model(self.model)
        self._aux_weight = policy.aux_loss_weight
        self.padding = padding_of(self.model, config.train.padding_free)
        self.micro_batches: list[Batch] = []
        self._totals: Totals | None = None
        self._figures: dict[str, list[float]] = defaultdict(list)
        self.corrections = CorrectionSet.of(session, policy.tokenizer)
        set_seed(arguments.seed, device_specific=True)  # each process draws its own dropout

    def get_train_dataloader(self) -> DataLoader:
        """One number for each optimizer step of an epoch, the same on all processes: what `Trainer` counts steps by."""
        steps = self.player.order.batches_per_epoch * self.run_config.train.mu
        return DataLoader([{"step": step} for step in range(steps)])

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: `Trainer` never sees a batch's tokens."""
        return 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One pass over a batch, which is played before the first of its passes. No checkpoint is written between two
        passes over a batch."""
        started, first_pass = time.monotonic(), self.state.global_step % self.run_config.train.mu == 0
        if first_pass:
            self.micro_batches, self._totals = self.next_batch()
        model.train()
        loss = torch.zeros((), device=self.accelerator.device)
        self.algorithm.start_pass(first_pass, self.state.global_step)
        for number, micro in enumerate(self.micro_batches, start=1):
            is_last = number == len(self.micro_batches)
            self.accelerator.sync_gradients = is_last  # where it is true, accelerate's DeepSpeed steps
            syncs = is_last or self._always_syncs
            context = nullcontext() if syncs else self.accelerator.no_sync(model)
            with self._offloads, context:
                share = self.loss_of(model, micro, first_pass)
                if is_last:  # before the backward, in which DeepSpeed steps: PPO may set the rate to 0
                    self.keep_figures(self.algorithm.end_pass(first_pass, self.accelerator, self))
                self.backward(share)
            loss += share.detach()
        self.keep_figures({"step_time": time.monotonic() - started})
        return loss

    def next_batch(self) -> tuple[list[Batch], Totals]:
        """Publish the weights, play a batch, prepare its micro-batches; all processes call this together."""
        step, accelerator, train = self.state.global_step, self.accelerator, self.run_config.train
        self.algorithm.before_batch(step, accelerator)
        self.player.wait_for_next(accelerator)
        played = self._publish_and_play(step)
        self.keep_figures(means_over_processes(played.figures))
        show_conversations(played.records, self.args.report_to, accelerator)
        if self.corrections is not None:
            self.corrections.add(accelerator, step, played.played)
            if train.corrections.mode == PASS:
                waiting, passes = self.corrections.count, self.corrections.cursor.passes
                self.keep_figures({"corrections/waiting": waiting, "corrections/passes": passes})
        samples, figures = self.algorithm.samples(played.records, played.left_out, step, accelerator)
        batch = Batch.of(samples, self.processing_class.pad_token_id, accelerator.device)
        divisions = divide(batch, len(played.records), self.run_config, self.padding)
        old = None  # of the policy before the first step on the batch; without them, the loss takes its own, detached
        if self.algorithm.needs_old_log_probs or train.mu > 1 or has_dropout(self.model):
            old = log_probs_of_batch(self.model, batch, divisions, accelerator, self.padding)
            batch = replace(batch, old_logps_BT=old.logps_BT)
        if self.reference is not None:
            with self.reference(self.model) as model:
                reference_scores = log_probs_of_batch(model, batch, divisions, accelerator, self.padding)
            batch = replace(batch, ref_logps_BT=reference_scores.logps_BT)
        if self.strong_tutor is not None:
            batch, strong_figures = self.strong_tutor.read(batch, samples, played.records, divisions, accelerator)
            figures |= strong_figures
        batch, advantage_figures = self.algorithm.advantages(batch, old, step, accelerator)
        self.keep_figures(figures | advantage_figures | self._completion_figures(played.records))
        micro_batches = [batch.take(rows) for rows in divisions]
        return micro_batches, totals(micro_batches, accelerator)

    def _publish_and_play(self, step: int) -> PlayedBatch:
        """Publish the weights, measure them on held-out lessons if that is due, and play a batch.

        A server that restarts meanwhile has lost weights that were sent from memory to memory. It refuses the batch on
        all processes until they are published again, and keeps what it has played. So does one that missed the version
        and takes over from another.
        """
        for attempts_left in reversed(range(_ATTEMPTS_AT_A_BATCH)):
            started = time.monotonic()
            version = self.publisher.publish(self)
            published = time.monotonic() - started
            try:
                if self.held_out is not None and self.held_out.is_due(step):
                    measure_held_out(self, self.held_out, version, step)
                played = self.player.play(version, step, self.state.max_steps, self.accelerator)
            except PolicyMismatch as error:
                if not (self.publisher.can_repeat and attempts_left):
                    raise
                logger.warning("policy %s is published again: %s", version, error)
            else:
                played.figures["seconds/publish"] = published
                return played
        raise AssertionError("the last attempt returns or raises")

    def loss_of(self, model: Any, micro: Batch, first_pass: bool) -> Tensor:
        """A micro-batch's share in the batch's loss, which is the sum over all micro-batches of all processes. It is
        multiplied by the number of processes, because their gradients are averaged."""
        comparison, has_aux = self.strong_tutor and self.strong_tutor.comparison(micro), self._aux_weight > 0
        scores = log_probs(model, micro, micro.wanted_BT, self.accelerator, self.padding, has_aux, comparison)
        loss = self.algorithm.loss(scores, micro, self._totals, first_pass) * self.accelerator.num_processes
        if scores.aux_loss is not None and self.algorithm.policy_learns:
            # The experts' balance: a mean over micro-batches and processes instead of a sum.
            loss = loss + self._aux_weight * scores.aux_loss / len(self.micro_batches)
            self.keep_figures({"aux_loss": self.accelerator.reduce(scores.aux_loss.detach(), reduction="mean").item()})
        return loss

    def backward(self, loss: Tensor) -> None:
        """Backward as accelerate wants it; DeepSpeed must not divide by a number of micro-batches."""
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}))

    def keep_figures(self, figures: dict[str, float]) -> None:
        """Keep figures, which must be the same on all processes, until `Trainer` logs the step."""
        for name, value in figures.items():
            self._figures[name].append(value)

    def _completion_figures(self, records: Sequence[Trajectory]) -> dict[str, float]:
        figures = completion_figures(records, end_ids(self.model, self.processing_class), self.accelerator)
        self.state.num_input_tokens_seen += round(figures.pop("batch_tokens"))
        return figures | {"num_tokens": float(self.state.num_input_tokens_seen)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what `Trainer` logs, with the means of the figures that were kept."""
        figures = {name: fmean(values) for name, values in self._figures.items()}
        self._figures.clear()
        super().log(logs | figures, start_time)

    def save_model(self, output_dir: str | None = None, *_: Any, **__: Any) -> None:
        """Save model and tokenizer, or only the adapter, and what else the algorithm trains, into a checkpoint
        (`weight_publisher.py` and `run.py` save others); all processes call this together."""
        super().save_model(output_dir)
        self.algorithm.save(Path(output_dir or self.args.output_dir), self.accelerator)

    def write_checkpoint_files(self, folder: Path) -> None:
        """Add to a checkpoint what the training needs besides `Trainer`'s files."""
        super().write_checkpoint_files(folder)
        if self.corrections is not None:
            self.corrections.save_cursor(folder)

    def create_optimizer(self, model: Any = None) -> Any:
        """transformers' optimizer, with the algorithm's own parameters in groups of their own."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        for own_group in self.algorithm.parameter_groups() if is_new else ():
            for group in optimizer.param_groups:  # a parameter may be in one group only
                group["params"] = [
                    parameter
                    for parameter in group["params"]
                    if not any(parameter is other for other in own_group["params"])
                ]
            optimizer.add_param_group(own_group)
        return optimizer

    def rate_of(self, group: dict[str, Any]) -> float:
        """The configured learning rate of a group of the optimizer's parameters."""
        return self.algorithm.rate_of(group)
