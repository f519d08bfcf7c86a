"""The changes that PPO makes to TRL's `GRPOTrainer`, beside those in `trainer/grpo/trl_hooks.py`: all overrides of its
private methods are in these two modules.

TRL samples the batch, computes the old log-probs and drives the `mu` passes over it; advantages and loss are replaced.
tests/trainer/test_trainer_hooks.py fails if a signature changes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from classroom_rl.config.train_rl import PPOConfig
from classroom_rl.trainer.batch_builder import ConversationRows
from classroom_rl.trainer.grpo.trainer import ClassroomGRPOTrainer
from classroom_rl.trainer.ppo.advantages import (
    NO_STEP,
    Estimates,
    cut_before_last_step,
    estimate,
    mean_and_variance,
    moments,
    token_rewards,
    whitened,
)
from classroom_rl.trainer.ppo.losses import (
    approximate_kl,
    explained_variance,
    is_clipped,
    is_value_clipped,
    kl_to_reference,
    policy_loss,
    value_loss,
)
from classroom_rl.trainer.ppo.steps import EpisodeSteps, EpisodeTokens, StepPlanner, rows_by_episode, step_tensors
from classroom_rl.trainer.ppo.value_head import ValueHead

SIGNATURES = {
    "_get_per_token_logps_and_entropies": (
        *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        *("compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask"),
        *("spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ),
    "_generate_and_score_completions": ("inputs",),
    "_generate": ("prompts",),
    "_compute_loss": ("model", "inputs"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "create_optimizer": ("model",),
}
"""The parameters of the methods that are overridden or called."""
ATTRIBUTES = (
    *("_step", "_metrics", "num_iterations", "current_gradient_accumulation_steps", "aux_loss_enabled"),
    *("router_aux_loss_coef", "epsilon_low", "epsilon_high", "beta"),
)
"""Attributes of a `GRPOTrainer` that are read or set."""
HEAD_GROUP = "of_value_head"
"""Marks the optimizer's group of parameters that has a learning rate of its own."""

_FIGURES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "value_clip_fraction")
_OF_VALUES = ("value_loss", "value_clip_fraction")


class PPOHooks(ClassroomGRPOTrainer):
    """The GRPO trainer with a critic: advantages come from its values, not from the other conversations of a group.

    Attributes:
        ppo: the configuration of PPO.
        value_head: the critic.
        has_rows_beside: whether messages have prompts of their own, and so rows of their own.
    """

    ppo: PPOConfig
    value_head: ValueHead
    has_rows_beside: bool = False
    needs_old_log_probs = True
    _steps: Sequence[EpisodeSteps] = ()
    _scores: Tensor | None = None
    _states: Tensor | None = None
    _old_states: Tensor | None = None
    _sums: Tensor | None = None
    _kl: Tensor | None = None
    _stopped = False

    # The batch ------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """The values of the same forward pass are kept: those of the states before each completion token, and of the
        one after the last, of shape (rows, T + 1)."""
        self.value_head.collected = []
        try:
            scored = super()._get_per_token_logps_and_entropies(*arguments, **named)
            collected = self.value_head.collected
        finally:
            self.value_head.collected = None
        if collected:  # the reference model has no head
            self._states = torch.cat(collected)
            if self._old_states is None:
                self._old_states = self._states.detach()
        return scored

    def _score_micro_batch(self, model: Any, ids: Tensor, attention: Tensor, wanted: Tensor, **named: Any) -> tuple:
        """As in GRPO; the states before, between and behind the completion's tokens are kept at its full width."""
        scored = super()._score_micro_batch(model, ids, attention, wanted, **named)
        if collected := self.value_head.collected:
            width = wanted.size(1) - self._cut.right
            collected[-1] = self._cut.undo_right(collected[-1][:, -width - 1 :])
        return scored

    def _pop_rows(self, extra: dict[str, Any]) -> Sequence[ConversationRows] | None:
        self._steps = extra.pop(StepPlanner.column)
        return [each.rows for each in self._steps] if self.has_rows_beside else None

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Tensor:
        rewards = super()._calculate_rewards(*arguments, **named)
        self._scores = rewards[:, 0]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's method, with the advantages of this module, and with what the critic is trained on."""
        self.before_batch()
        self._old_states = None  # the first forward pass without a gradient is that of the policy that sampled
        output = super()._generate_and_score_completions(inputs)
        return output | self._targets(output["completion_mask"])

    def before_batch(self) -> None:
        """Called on all processes before a batch is sampled."""

    def _targets(self, completion_mask: Tensor) -> dict[str, Tensor]:
        """Advantages, returns and old values of the batch. A conversation without a verdict has no step; one that was
        cut goes on with the critic's value of the state before its last step, where the critic is trained.

        Steps are counted along episodes, which may be several rows; all tensors inside are of episodes.
        """
        ppo, (rows, length) = self.ppo, completion_mask.shape
        messages, process, truncated = step_tensors(self._steps, rows, length, completion_mask.device)
        tokens = EpisodeTokens.of(rows_by_episode(self._steps), completion_mask.sum(dim=1))
        messages, process = tokens.joined(messages, NO_STEP), tokens.joined(process, 0.0)
        start = self.accelerator.process_index * len(messages)
        scores = self._scores[start : start + len(messages)]
        messages[scores.isnan()] = NO_STEP
        goes_on = truncated & ppo.bootstrap_truncated
        ended = messages.masked_fill(goes_on.unsqueeze(1), NO_STEP)
        rewards = token_rewards(messages, process, scores.nan_to_num(nan=0.0))
        old_values = self._old_states[:, :-1].float()
        if ppo.center_values and self.state.global_step == 0:
            mean = self._mean_return(rewards, ended, messages)
            self.value_head.offset.fill_(mean)
            old_values = old_values + mean
        values = tokens.joined(old_values, 0.0)
        share = moments(goes_on.float(), (messages != NO_STEP).any(dim=1))
        messages, bootstrap = cut_before_last_step(messages, goes_on, values, ppo.gae_over)
        found, of_critic = (
            estimate(rewards, values, messages, bootstrap, ppo.gamma, lam, ppo.gae_over)
            for lam in (ppo.lam, ppo.value_lam)
        )
        mask = messages != NO_STEP
        summed = self._log_batch(found, of_critic, values, mask, self._real_returns(rewards, ended), share)
        advantages = whitened(found.advantages, mask, summed) if ppo.whiten_advantages else found.advantages
        counts = torch.stack([mask.sum(), found.value_mask.sum()])
        items = self.accelerator.reduce(counts, reduction="sum").clamp(min=1)
        of_rows = {
            "advantages": advantages,
            "returns": of_critic.returns,
            "policy_mask": mask,
            "value_mask": found.value_mask,
        }
        return {name: tokens.apart(each, length, rows) for name, each in of_rows.items()} | {
            "old_values": old_values,
            "policy_items": items[0],
            "value_items": items[1],
        }

    def _real_returns(self, rewards: Tensor, messages: Tensor) -> Estimates:
        """The Monte-Carlo returns: what the critic should say of episodes whose rewards are all known."""
        nothing = torch.zeros_like(rewards)
        return estimate(rewards, nothing, messages, nothing[:, 0], self.ppo.gamma, 1.0, self.ppo.gae_over)

    def _mean_return(self, rewards: Tensor, ended: Tensor, messages: Tensor) -> float:
        """The mean Monte-Carlo return over the critic's states of all processes: in conversations that ended, or, if
        every one was cut, in all of them, with the verdicts on what there is of them."""
        own = [self._real_returns(rewards, each) for each in (ended, messages)]
        sums = torch.stack([moments(each.returns, each.value_mask) for each in own])
        of_ended, of_all = self.accelerator.reduce(sums, reduction="sum")
        return mean_and_variance(of_ended if of_ended[0] > 0 else of_all)[0]

    def _log_batch(
        self, found: Estimates, of_critic: Estimates, values: Tensor, mask: Tensor, real: Estimates, share: Tensor
    ) -> Tensor:
        """Log how good the critic was before this batch; returns the moments of the advantages. The explained variance
        is that of the Monte-Carlo returns: those of GAE hold the critic's own values.

        Args:
            mask: true for the tokens of steps.
            real: the Monte-Carlo returns of the conversations that ended.
            share: the moments of whether a conversation was cut.
        """
        own = [
            moments(found.advantages, mask),
            moments(of_critic.returns, of_critic.value_mask),
            moments(real.returns - values, real.value_mask),
            moments(real.returns, real.value_mask),
            share,
        ]
        advantages, returns, errors, known_returns, cut = self.accelerator.reduce(torch.stack(own), reduction="sum")
        mean, variance = mean_and_variance(advantages)
        figures = {
            "advantage_mean": mean,
            "advantage_std": variance**0.5,
            "returns_mean": mean_and_variance(returns)[0],
            "explained_variance": explained_variance(errors, known_returns),
            "truncated_share": mean_and_variance(cut)[0],
        }
        for name, value in figures.items():
            if value is not None:
                self.log_figure(f"ppo/{name}", value)
        return advantages

    # The loss -------------------------------------------------------------------------------------------------------

    @property
    def _only_critic_learns(self) -> bool:
        return self.state.global_step < self.ppo.value_warmup_steps

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The loss of PPO, of one micro-batch: its share in the means over all sampled tokens of the batch.

        While only the critic learns, and after a stop by `target_kl`, the policy's share is 0.
        """
        ppo, micro = self.ppo, self._step % self.args.steps_per_generation
        first_pass = self._step // self.args.steps_per_generation % self.num_iterations == 0
        if micro == 0:
            self._sums, self._kl = None, None
            self._stopped = self._stopped and not first_pass
        self.value_head.from_fixed_trunk = self._only_critic_learns or not ppo.train_trunk
        length = inputs["completion_ids"].size(1)
        with self._scoring(inputs["policy_mask"]):
            logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                length,
                compute_entropy=True,
                compute_aux_loss=self.aux_loss_enabled,
            )
        old_logps, values = inputs["old_per_token_logps"], self._states[:, :-1]
        clip = (self.epsilon_low, self.epsilon_high)
        of_policy = policy_loss(logps, old_logps, inputs["advantages"], *clip) * inputs["importance_sampling_ratio"]
        of_critic = value_loss(values, inputs["old_values"], inputs["returns"], ppo.value_clip)
        learned = of_policy
        if ppo.entropy_weight > 0:
            learned = learned - ppo.entropy_weight * entropies
        if self.beta != 0.0:
            learned = learned + self.beta * self._reference_kl(logps, inputs)
        with torch.no_grad():
            kl = approximate_kl(logps, old_logps)
            clipped = is_clipped(logps, old_logps, inputs["advantages"], *clip)
            far = is_value_clipped(values, inputs["old_values"], ppo.value_clip)
            self._add_up([of_policy, of_critic, entropies, kl, clipped, far], inputs)
        if micro == self.args.steps_per_generation - 1:
            self._finish_pass(inputs, first_pass)
        policy_share = 0.0 if self._only_critic_learns or self._stopped else 1.0
        critic_share = 0.0 if self._stopped else ppo.value_weight
        loss = policy_share * self._mean(learned, inputs, "policy")
        loss = loss + critic_share * self._mean(of_critic, inputs, "value")
        if self.aux_loss_enabled:
            weight = policy_share * self.router_aux_loss_coef / self.current_gradient_accumulation_steps
            loss = loss + weight * aux_loss
        return loss

    def _mean(self, per_token: Tensor, inputs: dict[str, Any], of: str) -> Tensor:
        """This micro-batch's share in the mean over the tokens of all processes: gradients are averaged over
        processes, and added up over micro-batches."""
        summed = torch.where(inputs[f"{of}_mask"], per_token, 0.0).sum()
        steps_in_batch = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        return summed * self.accelerator.num_processes * steps_in_batch / inputs[f"{of}_items"]

    def _reference_kl(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The estimate of KL(policy ‖ reference) of each token; it is added up for the log, too."""
        kl = kl_to_reference(logps, inputs["old_per_token_logps"], inputs["ref_per_token_logps"])
        summed = torch.where(inputs["policy_mask"], kl, 0.0).sum().detach()
        self._kl = summed if self._kl is None else self._kl + summed
        return kl

    def _add_up(self, per_token: Sequence[Tensor], inputs: dict[str, Any]) -> None:
        """Add a micro-batch's figures to those of its pass."""
        masks = [inputs["value_mask" if name in _OF_VALUES else "policy_mask"] for name in _FIGURES]
        own = torch.stack([torch.where(mask, each, 0.0).sum() for mask, each in zip(masks, per_token, strict=True)])
        self._sums = own if self._sums is None else self._sums + own

    def _finish_pass(self, inputs: dict[str, Any], first_pass: bool) -> None:
        """Log a pass over the batch, and stop this batch's updates if the policy has moved too far before it: its step
        has a learning rate of 0, on every process."""
        reference = self._sums.new_zeros(1) if self._kl is None else self._kl.reshape(1)
        sums = self.accelerator.reduce(torch.cat([self._sums, reference]), reduction="sum")
        figures = {
            name: (total / inputs["value_items" if name in _OF_VALUES else "policy_items"]).item()
            for name, total in zip(_FIGURES, sums, strict=False)
        }
        target = self.ppo.target_kl
        if target is not None:
            self._stopped = self._stopped or (not first_pass and figures["approx_kl"] > target)
            figures["stopped"] = float(self._stopped)
        for name, value in figures.items():
            self.log_figure(f"ppo/{name}", value)
        self.log_figure("entropy", figures["entropy"])
        if self.beta != 0.0:
            self.log_figure("kl", (sums[-1] / inputs["policy_items"]).item())
        if self._stopped:
            self._pause_optimizer()

    # The optimizer --------------------------------------------------------------------------------------------------

    def _pause_optimizer(self) -> None:
        """Set the learning rate of the coming step to 0; the scheduler sets it anew after the step."""
        scheduler = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # DeepSpeed's own is wrapped
        for optimizer in (scheduler.optimizer, self.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    def create_optimizer(self, model: Any = None) -> Any:
        """transformers' optimizer, with the head in a group of its own."""
        made = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made:
            own = list(self.value_head.parameters())
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if not any(each is one for one in own)]
            rate = self.ppo.value_learning_rate
            optimizer.add_param_group({"params": own, "lr": rate, "weight_decay": 0.0, HEAD_GROUP: True})
        return optimizer

    def rate_of(self, group: dict[str, Any]) -> float:
        """The configured learning rate of a group of the optimizer's parameters."""
        return self.ppo.value_learning_rate if group.get(HEAD_GROUP) else super().rate_of(group)
