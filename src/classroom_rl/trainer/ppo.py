"""Proximal policy optimization (Schulman et al. 2017): the samples and rollouts of GRPO, with advantages from a critic
instead of from the other episodes of a group."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import DataError
from classroom_rl.rollout.rows import POLICY, TrainingRow, rows_of
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.advantages import (
    NO_STEP,
    Estimates,
    ProcessRewards,
    cut_before_last_step,
    estimate,
    mean_and_variance,
    moments,
    process_rewards,
    shuffled,
    token_rewards,
    whitened,
)
from classroom_rl.trainer.batch import Batch, Sample, Totals
from classroom_rl.trainer.collective import on_main_process
from classroom_rl.trainer.critic import HEAD_FILE, ValueHead, add_value_head, head_weights, read_head, write_head
from classroom_rl.trainer.grpo import GRPO, reward_figures
from classroom_rl.trainer.log_probs import Scores
from classroom_rl.trainer.losses import (
    approximate_kl,
    clipped,
    is_clipped,
    is_value_clipped,
    kl_to_reference,
    value_loss,
)

CRITIC_FOLDER = "critic"
HEAD_GROUP = "of_value_head"
"""Marks the optimizer's group of parameters that has a learning rate of its own, in checkpoints, too."""


def critic_path(run_folder: Path, version: int) -> Path:
    """The file of the value head that belongs to a policy version."""
    return run_folder / CRITIC_FOLDER / f"v{version:06d}.safetensors"


class PPO(GRPO):
    """PPO's samples, advantages and loss.

    The critic is never published: it is in the checkpoints, and `critic/` in the run folder has the head of every
    version that a batch was sampled from.

    Args:
        checkpoint: the checkpoint to resume the critic from; None for a new one.

    Attributes:
        value_head: the critic, once the model has been prepared.
    """

    needs_old_log_probs = True
    value_head: ValueHead

    def __init__(self, config: TrainRLConfig, run_folder: Path, checkpoint: Path | None = None):
        super().__init__(config)
        self.ppo = config.train.ppo
        self._run_folder, self._checkpoint = run_folder, checkpoint
        self._steps: list[EpisodeSteps] = []
        self._stopped = self._only_critic_learns = False

    def prepare_model(self, model: Any) -> None:
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        self.value_head = add_value_head(base, self.ppo.head)
        if self._checkpoint is not None:
            read_head(self.value_head, self._checkpoint / HEAD_FILE)

    def parameter_groups(self) -> list[dict[str, Any]]:
        parameters = list(self.value_head.parameters())
        return [{"params": parameters, "lr": self.ppo.value_learning_rate, "weight_decay": 0.0, HEAD_GROUP: True}]

    def rate_of(self, group: dict[str, Any]) -> float:
        return self.ppo.value_learning_rate if group.get(HEAD_GROUP) else super().rate_of(group)

    def save(self, checkpoint: Path, accelerator: Accelerator) -> None:
        self._write_head(checkpoint / HEAD_FILE, accelerator)

    def before_batch(self, step: int, accelerator: Accelerator) -> None:
        """Keep the critic that belongs to the policy which is about to be published."""
        self._write_head(critic_path(self._run_folder, step), accelerator)

    def _write_head(self, path: Path, accelerator: Accelerator) -> None:
        weights = head_weights(self.value_head)
        on_main_process(accelerator, lambda: write_head(weights, path))

    # The samples of a batch, and their advantages -------------------------------------------------------------------

    def samples(
        self, records: Sequence[Trajectory], left_out: Set[int], step: int, accelerator: Accelerator
    ) -> tuple[list[Sample], dict[str, float]]:
        """Every message that the policy sampled and that is part of the episode. The advantages come later."""
        rewards = [process_rewards(record, rows_of(record), self._turn_weights) for record in records]
        if self.train.turn_credit.shuffle:
            start = accelerator.process_index * len(rewards)
            all_rewards = shuffled(gather_object(rewards), self._seed * 1_000_003 + step)
            rewards = all_rewards[start : start + len(rewards)]
        scores = self.outcomes(records, step)
        start = accelerator.process_index * len(records)
        weight = self.train.turn_credit.weight
        self._steps = [
            steps_of(record, process, score, weight)
            for record, process, score in zip(records, rewards, scores[start : start + len(records)], strict=True)
        ]
        samples = [
            Sample(row, [0.0] * len(row.completion_ids), index not in left_out)
            for index, record in enumerate(records)
            for row in _policy_rows(record)
        ]
        return samples, reward_figures(scores, self.train.num_samples_per_problem, self.train.scale_rewards)

    def advantages(self, batch: Batch, old: Scores, step: int, accelerator: Accelerator) -> tuple[Batch, dict]:
        """Advantages, returns and old values of the batch, and figures for the log. An episode without a verdict has no
        step; one that was cut goes on with the critic's value of the state before its last step, where the critic is
        trained.

        Steps are counted along episodes, which may be several samples; all tensors inside are of episodes.
        """
        ppo, device = self.ppo, batch.completion_ids_BT.device
        tokens = EpisodeTokens(batch.completion_mask_BT.bool(), [len(steps.messages) for steps in self._steps])
        numbers = [torch.tensor(steps.messages, dtype=torch.long, device=device) for steps in self._steps]
        messages = pad_sequence(numbers, batch_first=True, padding_value=NO_STEP)
        process = pad_sequence([torch.tensor(steps.process, device=device) for steps in self._steps], batch_first=True)
        scores = torch.tensor([float("nan") if steps.score is None else steps.score for steps in self._steps])
        scores, truncated = scores.to(device), torch.tensor([steps.truncated for steps in self._steps], device=device)
        messages[scores.isnan()] = NO_STEP
        goes_on = truncated & ppo.bootstrap_truncated
        ended = messages.masked_fill(goes_on.unsqueeze(1), NO_STEP)
        rewards = token_rewards(messages, process, scores.nan_to_num(nan=0.0))
        old_values = old.values[:, :-1].float()
        if ppo.center_values and step == 0:
            mean = self._mean_return(rewards, ended, messages, accelerator)
            self.value_head.offset.fill_(mean)
            old_values = old_values + mean
        values = tokens.joined(old_values)
        share = moments(goes_on.float(), (messages != NO_STEP).any(dim=1))
        messages, bootstrap = cut_before_last_step(messages, goes_on, values, ppo.gae_over)
        of_policy, of_critic = (
            estimate(rewards, values, messages, bootstrap, ppo.gamma, lam, ppo.gae_over)
            for lam in (ppo.lam, ppo.value_lam)
        )
        mask = messages != NO_STEP
        real = self._real_returns(rewards, ended)
        summed, figures = _batch_figures(of_policy, of_critic, values, mask, real, share, accelerator)
        advantages = whitened(of_policy.advantages, mask, summed) if ppo.whiten_advantages else of_policy.advantages
        with_advantages = replace(
            batch,
            mask_BT=tokens.apart(mask),
            advantages_BT=tokens.apart(advantages),
            value_mask_BT=tokens.apart(of_policy.value_mask),
            returns_BT=tokens.apart(of_critic.returns),
            old_values_BT=old_values,
        )
        return with_advantages, figures

    def _real_returns(self, rewards: Tensor, messages: Tensor) -> Estimates:
        """The Monte-Carlo returns: what the critic should say of episodes whose rewards are all known."""
        nothing = torch.zeros_like(rewards)
        return estimate(rewards, nothing, messages, nothing[:, 0], self.ppo.gamma, 1.0, self.ppo.gae_over)

    def _mean_return(self, rewards: Tensor, ended: Tensor, messages: Tensor, accelerator: Accelerator) -> float:
        """The mean Monte-Carlo return over the critic's states of all processes: in episodes that ended, or, if every
        one was cut, in all of them, with the verdicts on what there is of them."""
        candidates = [self._real_returns(rewards, numbers) for numbers in (ended, messages)]
        sums = torch.stack([moments(estimates.returns, estimates.value_mask) for estimates in candidates])
        of_ended, of_all = accelerator.reduce(sums, reduction="sum")
        return mean_and_variance(of_ended if of_ended[0] > 0 else of_all)[0]

    # The loss -------------------------------------------------------------------------------------------------------

    def start_pass(self, first_pass: bool, step: int) -> None:
        """Called before the first micro-batch of a pass."""
        self._stopped = self._stopped and not first_pass
        self._only_critic_learns = step < self.ppo.value_warmup_steps
        self.value_head.from_fixed_trunk = self._only_critic_learns or not self.ppo.train_trunk

    @property
    def policy_learns(self) -> bool:
        return not (self._only_critic_learns or self._stopped)

    def loss(self, scores: Scores, micro: Batch, totals: Totals, first_pass: bool) -> Tensor:
        """A micro-batch's share in the means over all sampled tokens of the batch. While only the critic learns, and
        after a stop by `target_kl`, the policy's share is 0."""
        micro = self.distilled(micro, micro.old_logps_BT)
        logps, old, mask = scores.logps_BT, micro.old_logps_BT, micro.mask_BT
        values, value_mask = scores.values[:, :-1], micro.value_mask_BT
        of_policy = clipped(logps, old, micro.advantages_BT, mask, self.options)
        of_policy = of_policy * self.engine_ratio(old, micro, first_pass)
        of_critic = value_loss(values, micro.old_values_BT, micro.returns_BT, self.ppo.value_clip)
        learned = of_policy
        if self.ppo.entropy_weight > 0:
            learned = learned - self.ppo.entropy_weight * scores.entropy_BT
        if micro.ref_logps_BT is not None:
            kl = kl_to_reference(logps, old, micro.ref_logps_BT)
            learned = learned + self.train.beta * kl
            self._means.add("kl", kl, mask)
        if scores.hook_output is not None:
            learned = learned + self.weighted_divergence(scores, micro)
        with torch.no_grad():
            below, above = is_clipped(logps, old, micro.advantages_BT, self.options)
            self._means.add("ppo/policy_loss", of_policy, mask)
            self._means.add("ppo/value_loss", of_critic, value_mask)
            self._means.add("entropy", scores.entropy_BT, mask)
            self._means.add("ppo/approx_kl", approximate_kl(logps, old), mask)
            self._means.add("ppo/clip_fraction", below | above, mask)
            far = is_value_clipped(values, micro.old_values_BT, self.ppo.value_clip)
            self._means.add("ppo/value_clip_fraction", far, value_mask)
        share = 1.0 if self.policy_learns else 0.0
        loss = share * torch.where(mask, learned, 0.0).sum() / totals.tokens
        weight = 0.0 if self._stopped else self.ppo.value_weight
        return loss + weight * torch.where(value_mask, of_critic, 0.0).sum() / totals.values

    def end_pass(self, first_pass: bool, accelerator: Accelerator, trainer: Any) -> dict[str, float]:
        """The figures of a pass; it also stops this batch's updates if the policy had moved too far before it: its step
        has a learning rate of 0, on every process."""
        figures = super().end_pass(first_pass, accelerator, trainer)
        if "entropy" in figures:
            figures["ppo/entropy"] = figures["entropy"]
        if self.ppo.target_kl is not None:
            moved = figures.get("ppo/approx_kl", 0.0) > self.ppo.target_kl
            self._stopped = self._stopped or (not first_pass and moved)
            figures["ppo/stopped"] = float(self._stopped)
        if self._stopped:
            _zero_learning_rate(trainer)
        return figures


def _zero_learning_rate(trainer: Trainer) -> None:
    """Set the learning rate of the coming step to 0; the scheduler sets it anew after the step. The optimizer's moments
    take the step's gradients in all the same."""
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # DeepSpeed's own is wrapped
    for optimizer in (scheduler.optimizer, trainer.optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.0


def _batch_figures(
    of_policy: Estimates,
    of_critic: Estimates,
    values: Tensor,
    mask: Tensor,
    real: Estimates,
    share: Tensor,
    accelerator: Accelerator,
) -> tuple[Tensor, dict[str, float]]:
    """The moments of the advantages, and figures that say how good the critic was before this batch. The explained
    variance is that of the Monte-Carlo returns: those of GAE hold the critic's own values.

    Args:
        mask: true for the tokens of steps.
        real: the Monte-Carlo returns of the episodes that ended.
        share: the moments of whether an episode was cut.
    """
    local_moments = [
        moments(of_policy.advantages, mask),
        moments(of_critic.returns, of_critic.value_mask),
        moments(real.returns - values, real.value_mask),
        moments(real.returns, real.value_mask),
        share,
    ]
    advantages, returns, errors, known_returns, cut = accelerator.reduce(torch.stack(local_moments), reduction="sum")
    mean, variance = mean_and_variance(advantages)
    figures = {
        "ppo/advantage_mean": mean,
        "ppo/advantage_std": variance**0.5,
        "ppo/returns_mean": mean_and_variance(returns)[0],
        "ppo/explained_variance": explained_variance(errors, known_returns),
        "ppo/truncated_share": mean_and_variance(cut)[0],
    }
    return advantages, {name: value for name, value in figures.items() if value is not None}


def explained_variance(of_errors: Tensor, of_returns: Tensor) -> float | None:
    """1 − Var(return − value) / Var(return): 1 for a perfect critic, 0 for one that knows only a constant, below 0 for
    one that is worse. None if all returns are equal.

    Args:
        of_errors, of_returns: the `moments` of return − value and of the returns.
    """
    _, error = mean_and_variance(of_errors)
    _, spread = mean_and_variance(of_returns)
    return None if spread <= 1e-12 else 1 - error / spread


@dataclass(frozen=True)
class EpisodeTokens:
    """The tokens of a batch's samples, which are in the order of their episodes: those of an episode follow each other.
    E is the number of episodes, L the most tokens of one.

    Attributes:
        is_token_BT: false for the padding of samples.
        lengths: the number of tokens of each episode, in all of its samples.
    """

    is_token_BT: Tensor
    lengths: list[int]

    def joined(self, tokens_BT: Tensor) -> Tensor:
        """Values of samples as those of episodes, of shape (E, L), with 0 as padding."""
        return pad_sequence(tokens_BT[self.is_token_BT].split(self.lengths), batch_first=True)

    def apart(self, joined: Tensor) -> Tensor:
        """Values of episodes as those of samples, of shape (B, T), with 0 as padding."""
        is_token = self.joined(self.is_token_BT)
        return joined.new_zeros(self.is_token_BT.shape).masked_scatter(self.is_token_BT, joined[is_token])


@dataclass(frozen=True)
class EpisodeSteps:
    """The steps of one episode, over the completion tokens of its samples: its own one first, then those of messages
    with a prompt of their own, in the order of the messages.

    Attributes:
        messages: the number of the message that each token belongs to, from 0; `NO_STEP` for tokens that were not
            sampled.
        process: the reward of a message at its last sampled token, 0 elsewhere.
        truncated: whether the episode was cut before its end.
        score: the episode's reward; None without one.
    """

    messages: list[int]
    process: list[float]
    truncated: bool
    score: float | None


def steps_of(record: Trajectory, rewards: ProcessRewards, score: float | None, weight: float) -> EpisodeSteps:
    """The steps of an episode. Its process rewards add up to `weight` times their mean over its messages: with a sum,
    long lessons would look bad.

    Raises:
        DataError: if a sampled token belongs to no message.
    """
    messages = [number for row in _policy_rows(record) for number in _messages_of(record, row)]
    last = {number: token for token, number in enumerate(messages) if number != NO_STEP}
    scored = {number: rewards.messages[number] for number in last if rewards.messages[number] is not None}
    process = [0.0] * len(messages)
    for number, reward in scored.items():
        process[last[number]] = weight * reward / len(scored)
    return EpisodeSteps(messages, process, record.truncated, score)


def _policy_rows(record: Trajectory) -> list[TrainingRow]:
    return [row for row in rows_of(record) if row.kind == POLICY]


def _messages_of(record: Trajectory, row: TrainingRow) -> list[int]:
    numbers = [number if is_sampled else NO_STEP for number, is_sampled in zip(row.messages, row.mask, strict=True)]
    if any(is_sampled and number == NO_STEP for number, is_sampled in zip(numbers, row.mask, strict=True)):
        raise DataError(f"{record.id}: a token that the policy sampled is in no message's span.")
    return numbers
