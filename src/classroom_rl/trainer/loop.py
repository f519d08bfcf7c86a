"""The training loop of all algorithms.

One optimizer step is one pass over a batch of episodes:

    publish the weights         before a batch is played, so that the server's engine samples with them
    play the batch              on the server: episodes with rewards
    samples and advantages      `grpo.py` or `ppo.py`
    log-probs before the step   where they are needed: of the policy, of the reference
    for each micro-batch        log-probs, loss, backward
    optimizer step, schedule    transformers' `Trainer`

With `train.mu` above 1 the next steps pass over the same batch again. `Trainer` drives the steps, clips, schedules,
logs and saves; it sees one batch of one number for each step, and only public methods of it are overridden here.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
from classroom_rl.errors import ConfigError, PolicyMismatch, TrainingCollapsed
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.batch import Batch, Totals, micro_batches, token_limit, totals
from classroom_rl.trainer.callbacks import show_conversations
from classroom_rl.trainer.collective import on_main_process
from classroom_rl.trainer.correction_set import CorrectionSet
from classroom_rl.trainer.group_variance import PlayedBatch
from classroom_rl.trainer.grpo import GRPO
from classroom_rl.trainer.held_out_evaluation import HeldOutEvaluation
from classroom_rl.trainer.log_probs import Scores, has_dropout, log_probs, padding_of, without_dropout
from classroom_rl.trainer.metrics import completion_figures, means_over_processes
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
        policy: the model that is trained, its tokenizer, and the reference.
        algorithm: GRPO, or PPO.

    Attributes:
        publisher: publishes the weights.
        player: has the server play the batches.
        held_out: measures the policy on held-out lessons; None without evaluations.
        corrections: what the supervisor corrected; None without one.
        temperature: what logits are divided by.
        padding: what becomes of the padding of micro-batches.
        micro_batches: those of the last batch.
    """

    def __init__(self, session: TrainingSession, policy: Policy, algorithm: GRPO, arguments: TrainingArguments):
        if arguments.n_gpu > 1:
            raise ConfigError(
                f"This process sees {arguments.n_gpu} GPUs and would train on copies of the model in threads. Start "
                "one process for each GPU (start_rl_training.sh, or accelerate launch), or show it one with "
                "CUDA_VISIBLE_DEVICES."
            )
        config = self.run_config = session.config
        self.contents, self.has_adapter = session.contents, config.teacher_model.adapter is not None
        self.algorithm, self.temperature = algorithm, config.teacher_model.vllm.temperature
        self.player, self.publisher = BatchPlayer(session), WeightPublisher(session)
        self.held_out = HeldOutEvaluation(session, self.player) if config.evaluation.every else None
        if self.held_out is not None and config.evaluation.keep_best:
            self.best_step = self.held_out.best_step
        super().__init__(model=policy.model, args=arguments, processing_class=policy.tokenizer)
        self._offloads: AbstractContextManager[Any] = nullcontext()
        if config.train.activation_offloading:
            self._offloads = get_act_offloading_ctx_manager(self.model)
        self._reduces_every_time = self.is_deepspeed_enabled  # it waits for the last micro-batch by itself
        if config.train.grad_accum_fp32:
            accumulate_in_float32(self.accelerator)
            self._reduces_every_time |= self.accelerator.distributed_type == DistributedType.FSDP
        self.reference = policy.prepare_reference(self.accelerator)
        algorithm.prepare_model(self.model)
        self._aux_weight = policy.aux_loss_weight
        self.padding = padding_of(self.model, config.train.padding_free)
        self.micro_batches: list[Batch] = []
        self._totals: Totals | None = None
        self._figures: dict[str, list[float]] = defaultdict(list)
        self.corrections = CorrectionSet.of(session, policy.tokenizer)
        set_seed(arguments.seed, device_specific=True)  # each process draws its own dropout

    def get_train_dataloader(self) -> DataLoader:
        """One number for each optimizer step of an epoch: what `Trainer` counts steps by."""
        steps = self.player.order.batches_per_epoch * self.run_config.train.mu
        return DataLoader([{"step": place} for place in range(steps)])

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: what `Trainer` sees of a batch is no tokens."""
        return 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One pass over a batch, which is played before the first of its passes; `Trainer` steps the optimizer."""
        started, first_pass = time.monotonic(), self.state.global_step % self.run_config.train.mu == 0
        if first_pass:
            self.micro_batches, self._totals = self.next_batch()
        model.train()
        loss = torch.zeros((), device=self.accelerator.device)
        self.algorithm.start_pass(first_pass, self.state.global_step)
        for place, micro in enumerate(self.micro_batches, start=1):
            is_last = place == len(self.micro_batches)
            self.accelerator.sync_gradients = is_last
            syncs = is_last or self._reduces_every_time
            with self._offloads, nullcontext() if syncs else self.accelerator.no_sync(model):
                share = self.loss_of(model, micro, first_pass)
                if is_last:
                    self.log_figures(self.algorithm.end_pass(first_pass, self.accelerator, self))
                self.backward(share)
            loss += share.detach()
        self.log_figures({"step_time": time.monotonic() - started})
        return loss

    def next_batch(self) -> tuple[list[Batch], Totals]:
        """Play a batch, and prepare its micro-batches; all processes call this together."""
        step, accelerator, train = self.state.global_step, self.accelerator, self.run_config.train
        self.algorithm.before_batch(step, accelerator)
        self.player.wait_for_next(accelerator)
        played = self._publish_and_play(step)
        self.log_figures(means_over_processes(played.figures))
        show_conversations(played.records, self.args.report_to, accelerator)
        if self.corrections is not None:
            self.corrections.add(accelerator, step, played.played)
            if train.corrections.mode == PASS:
                waiting, passes = self.corrections.count, self.corrections.cursor.passes
                self.log_figures({"corrections/waiting": waiting, "corrections/passes": passes})
        samples, figures = self.algorithm.samples(played.records, played.left_out, step, accelerator)
        batch = Batch.of(samples, self.processing_class.pad_token_id, accelerator.device)
        count = math.ceil(len(played.records) / train.per_device_train_batch_size)  # however many samples they give
        rows = math.ceil(len(samples) / count)
        limit = token_limit(self.run_config, rows, accelerator.device)
        divisions = micro_batches(batch, rows, limit, self.padding)
        old = None  # the policy's scores before the first step on the batch
        if self.algorithm.needs_old_log_probs or train.mu > 1 or has_dropout(self.model):
            old = self.score_batch(self.model, batch, divisions)
            batch = replace(batch, old_logps_BT=old.logps_BT)
        if self.reference is not None:
            with self.reference(self.model) as model:
                batch = replace(batch, ref_logps_BT=self.score_batch(model, batch, divisions).logps_BT)
        batch, of_advantages = self.algorithm.advantages(batch, old, step, accelerator)
        self.log_figures(figures | of_advantages | self._completion_figures(played.records))
        micro = [batch.take(each) for each in divisions]
        return micro, totals(micro, accelerator)

    def _publish_and_play(self, step: int) -> PlayedBatch:
        """Publish the weights, measure them on held-out lessons if that is due, and play a batch with them. A server
        that restarts meanwhile has lost weights that came from this process's memory, and refuses the batch until they
        are published again; what it has played is kept. So with more servers than processes, if the only ones left have
        missed the version."""
        for attempts_left in reversed(range(_ATTEMPTS_AT_A_BATCH)):
            started = time.monotonic()
            policy = self.publisher.publish(self)
            published = time.monotonic() - started
            try:
                if self.held_out is not None and self.held_out.is_due(step):
                    self.measure_held_out(policy, step)
                played = self.player.play(policy, step, self.state.max_steps, self.accelerator)
            except PolicyMismatch as error:
                if not (self.publisher.can_repeat and attempts_left):
                    raise
                logger.warning("policy %s is published again: %s", policy, error)
            else:
                played.figures["seconds/publish"] = published
                return played
        raise AssertionError("the last attempt returns or raises")

    def measure_held_out(self, policy: PolicyVersion, step: int, last: bool = False) -> None:
        """Measure the policy, which the servers have loaded, on the held-out lessons, log the figures at this step, and
        save a checkpoint if they are the best so far; all processes call this together.

        Args:
            last: the training has ended, so nothing is left to stop.

        Raises:
            TrainingCollapsed: on every process, if the policy has collapsed and that shall stop the training.
            ClassroomError: as `HeldOutEvaluation.measure`.
        """
        options, evaluation = self.run_config.evaluation, self.held_out
        found = evaluation.measure(policy, step, self.accelerator)
        super().log(found.figures)
        self.log_figures({"seconds/eval": found.figures["heldout/seconds"]})
        if options.keep_best and found.best_step == step:
            self.best_step = step
            self.save_progress()
            on_main_process(self.accelerator, lambda: evaluation.write_best(Path(self.args.output_dir)))
        if not found.collapse:
            return
        why = f"step {step}: on held-out lessons the policy has collapsed: {'; '.join(found.collapse)}"
        if options.stop_on_collapse and not last:
            raise TrainingCollapsed(
                f"{why}. The training was stopped, with a checkpoint of this step. Begin anew in another folder "
                "(logging.save_dir=…) with a lower train.learning_rate or a higher train.beta; or go on all the same "
                "with evaluation.stop_on_collapse=false."
            )
        if self.accelerator.is_main_process:
            logger.warning("%s", why)

    def loss_of(self, model: Any, micro: Batch, first_pass: bool) -> Tensor:
        """A micro-batch's share in the loss of the batch, times the number of processes: their gradients are averaged,
        and those of micro-batches added up."""
        scores = log_probs(model, micro, micro.wanted_BT, self.accelerator, self.padding, self._aux_weight > 0)
        loss = self.algorithm.loss(scores, micro, self._totals, first_pass) * self.accelerator.num_processes
        if scores.aux_loss is not None and self.algorithm.policy_learns:
            loss = loss + self._aux_weight * scores.aux_loss / len(self.micro_batches)
            everyones = self.accelerator.reduce(scores.aux_loss.detach(), reduction="mean")
            self.log_figures({"aux_loss": everyones.item()})
        return loss

    @torch.no_grad()
    def score_batch(self, model: Any, batch: Batch, divisions: Sequence[Sequence[int]]) -> Scores:
        """The log-probs of a whole batch, and a critic's values, without gradient and without dropout; all processes
        call this together.

        Args:
            divisions: the rows of each micro-batch.
        """
        logps = torch.zeros_like(batch.sampling_logps_BT)
        values = None
        with without_dropout(self.model):
            for chosen in divisions:
                micro = batch.take(chosen)
                found = log_probs(model, micro, micro.wanted_BT, self.accelerator, self.padding)
                if not chosen:  # computed all the same: sharded weights are gathered together
                    continue
                logps[chosen] = found.logps_BT.to(logps.dtype)
                if found.values is not None:
                    values = found.values.new_zeros(len(logps), found.values.size(1)) if values is None else values
                    values[chosen] = found.values
        return Scores(logps, None, values, None)

    def backward(self, loss: Tensor) -> None:
        """Backward as accelerate wants it; DeepSpeed must not divide by a number of micro-batches."""
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}))

    # Figures --------------------------------------------------------------------------------------------------------

    def log_figures(self, figures: dict[str, float]) -> None:
        """Log figures, which all processes know, with this step's."""
        for name, value in figures.items():
            self._figures[name].append(value)

    def _completion_figures(self, records: Sequence[Trajectory]) -> dict[str, float]:
        tokenizer = self.processing_class
        ends = [*self._end_ids, tokenizer.pad_token_id]
        figures = completion_figures(records, ends, self.accelerator)
        self.state.num_input_tokens_seen += round(figures.pop("batch_tokens"))
        return figures | {"num_tokens": float(self.state.num_input_tokens_seen)}

    @property
    def _end_ids(self) -> list[int]:
        found = self.model.generation_config.eos_token_id if self.model.generation_config else None
        own = found if isinstance(found, list) else [] if found is None else [found]
        return [*own, self.processing_class.eos_token_id]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a step, with the means of its figures."""
        figures = {name: fmean(values) for name, values in self._figures.items()}
        self._figures.clear()
        super().log(logs | figures, start_time)

    # Files ----------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, *_: Any, **__: Any) -> None:
        """Save model and tokenizer, or only the adapter, and what else the algorithm trains, into a checkpoint. What is
        published or released does not come from here. All processes call this together."""
        super().save_model(output_dir)
        self.algorithm.save(Path(output_dir or self.args.output_dir), self.accelerator)

    def write_checkpoint_files(self, folder: Path) -> None:
        """Add to a checkpoint what the training needs besides `Trainer`'s files."""
        super().write_checkpoint_files(folder)
        if self.corrections is not None:
            self.corrections.save_cursor(folder)

    # The optimizer --------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """transformers' optimizer, with the algorithm's own parameters in groups of their own."""
        made, optimizer = self.optimizer is None, super().create_optimizer(model)
        for own in self.algorithm.parameter_groups() if made else ():
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if not any(each is one for one in own["params"])]
            optimizer.add_param_group(own)
        return optimizer

    def rate_of(self, group: dict[str, Any]) -> float:
        """The configured learning rate of a group of the optimizer's parameters."""
        return self.algorithm.rate_of(group)

    def pause_optimizer(self) -> None:
        """Set the learning rate of the coming step to 0; the scheduler sets it anew after the step."""
        scheduler = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # DeepSpeed's own is wrapped
        for optimizer in (scheduler.optimizer, self.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    def step_beside(self, loss: Tensor) -> None:
        """One optimizer step on a loss, beside those of the training: no counter of steps moves."""
        self.accelerator.sync_gradients = True
        self.backward(loss)
        if self.args.max_grad_norm > 0:
            self.accelerator.clip_grad_norm_(self.model_wrapped.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.model_wrapped.zero_grad()
