"""Group relative policy optimization (Shao et al. 2024, "DeepSeekMath"), with credit for single messages, for players,
and with the cross-entropy of a supervisor's corrections in the same step.

An algorithm says which samples an episode gives, with which advantages, and what the loss of a micro-batch is;
`trainer/loop.py` does the rest.
"""

import random
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import criterion_weights
from classroom_rl.config.values import BY_BATCH, CHANGED, NO_CREDIT, SAME_STEP
from classroom_rl.rollout.rows import CORRECTION, DRAFT, NO_MESSAGE, POLICY, TrainingRow, rows_of
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.advantages import (
    Credits,
    PlayerRewards,
    advantages_per_criterion,
    by_player,
    group_credits,
    merged,
    outcome_advantages,
    process_rewards,
    shuffled,
    to_step,
)
from classroom_rl.trainer.batch import Batch, Sample, Totals
from classroom_rl.trainer.log_probs import Scores
from classroom_rl.trainer.losses import (
    LossOptions,
    at_sequence_level,
    cross_entropy,
    importance_ratio,
    is_clipped,
    kl_to_reference,
    policy_loss_of,
    reduced,
)
from classroom_rl.trainer.metrics import MismatchFigures, TokenMeans


class GRPO:
    """GRPO's samples, advantages and loss. The loop calls `prepare_model` and `parameter_groups` once; for each batch
    `before_batch`, `samples` and `advantages`; for each pass over it `start_pass`, `loss` for each micro-batch, and
    `end_pass`.

    Args:
        config: the loss, turn credit, corrections, and the size of a group.

    Attributes:
        needs_old_log_probs: whether the log-probs before a batch's first step are needed in any case.
        criteria: the weights of what is compared one by one; {} if rewards are compared as a whole.
        policy_learns: whether this pass over a batch changes the policy.
    """

    needs_old_log_probs = False
    policy_learns = True

    def __init__(self, config: TrainRLConfig):
        train = self.train = config.train
        self._policy_loss, self._mean_over = policy_loss_of(train.loss_type)
        self._by_sequence = train.importance_sampling_level == "sequence"
        self.options = LossOptions(train.epsilon, train.upper_clip, config.generation.max_tokens_in_conversation)
        self._turn_weights = config.train.turn_credit.weights
        self.criteria = criterion_weights(config)
        self._seed, self._temperature = config.seed, config.policy_model.vllm.temperature
        self._means, self._mismatch = TokenMeans(), MismatchFigures()

    def prepare_model(self, model: Any) -> None:
        """Add what the algorithm has in the model."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Groups of parameters with options of their own, for the optimizer."""
        return []

    def rate_of(self, group: dict[str, Any]) -> float:
        """The configured learning rate of a group of the optimizer's parameters."""
        return self.train.learning_rate

    def save(self, checkpoint: Path, accelerator: Accelerator) -> None:
        """Write what the algorithm trains besides the policy into a checkpoint; all processes call this together."""

    def before_batch(self, step: int, accelerator: Accelerator) -> None:
        """Called before the weights are published; all processes call this together."""

    # The samples of a batch, and their advantages -------------------------------------------------------------------

    def samples(
        self, records: Sequence[Trajectory], left_out: Set[int], step: int, accelerator: Accelerator
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples of this process's episodes with their advantages, and figures for the log; all processes call
        this together.

        Args:
            left_out: the indices of the episodes whose sampled tokens are not trained on.
        """
        rows = [[self._with_targets(row) for row in rows_of(record)] for record in records]
        kept = self._kept_corrections(rows, step, accelerator)
        credits, figures = self._credits(records, rows, step, accelerator)
        samples = [
            sample
            for index, (episode_rows, credit) in enumerate(zip(rows, credits, strict=True))
            for sample in self._samples_of(episode_rows, credit, kept.get(index, set()), index not in left_out)
        ]
        if corrections := sum(gather_object([sum(1 in sample.row.target for sample in samples)])):
            figures["corrections/rows"] = corrections
        return samples, figures

    def _samples_of(
        self, rows: Sequence[TrainingRow], credits: Credits, corrections: Set[int], learns: bool
    ) -> list[Sample]:
        """The episode itself, messages with a prompt of their own, rejected drafts, and corrections."""
        episode, *_ = rows
        numbers = episode.messages
        tokens = [credits.outcome if number == NO_MESSAGE else credits.messages[number] for number in numbers]
        samples, of_drafts = [Sample(episode, tokens, learns)], iter(credits.drafts)
        for index, row in enumerate(rows[1:], start=1):
            advantage = 0.0
            if row.kind == DRAFT:
                advantage = next(of_drafts)
            elif row.kind == POLICY:  # a message that was written in another context
                advantage = credits.messages[row.message]
            learns_draft = row.kind == DRAFT and self.train.turn_credit.mode != NO_CREDIT
            if row.kind == POLICY or learns_draft or index in corrections:
                samples.append(Sample(row, [advantage] * len(row.completion_ids), learns))
        return samples

    def _with_targets(self, row: TrainingRow) -> TrainingRow:
        """The row with the targets that are to be trained on."""
        if self.train.corrections.targets != CHANGED or not row.unchanged:
            return row
        end = row.target.index(1) + row.unchanged
        return replace(row, target=[0] * end + row.target[end:])

    def _kept_corrections(
        self, rows: Sequence[Sequence[TrainingRow]], step: int, accelerator: Accelerator
    ) -> dict[int, set[int]]:
        """The corrections that are mixed into this step, by episode: all, or as many as may be, drawn."""
        options = self.train.corrections
        if options.mode != SAME_STEP or options.weight == 0:
            return {}
        candidates = [
            (episode, index)
            for episode, episode_rows in enumerate(rows)
            for index, row in enumerate(episode_rows)
            if row.kind == CORRECTION
        ]
        batch = self.train.number_of_problems_per_batch * self.train.num_samples_per_problem
        share = max(1, (options.rows_per_batch or batch) // accelerator.num_processes)
        draw = random.Random(f"{self._seed}|{step}|{accelerator.process_index}|corrections")
        kept: dict[int, set[int]] = {}
        for episode, index in candidates if len(candidates) <= share else draw.sample(candidates, share):
            kept.setdefault(episode, set()).add(index)
        return kept

    def outcomes(self, records: Sequence[Trajectory], step: int) -> list[float | None]:
        """All episodes' rewards, permuted with `train.shuffle_rewards`; all processes call this together."""
        rewards = gather_object([record.reward for record in records])
        if not self.train.shuffle_rewards:
            return rewards
        order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(self._seed * 1_000_003 + step))
        return [rewards[index] for index in order.tolist()]

    def _credits(
        self,
        records: Sequence[Trajectory],
        rows: Sequence[Sequence[TrainingRow]],
        step: int,
        accelerator: Accelerator,
    ) -> tuple[list[Credits], dict[str, float]]:
        """The advantages of the messages of this process's episodes, and figures of all episodes' rewards."""
        local_episodes = [
            [self._with_steps(player) for player in by_player(process, record.players, record.reward, parts)]
            for record, episode_rows in zip(records, rows, strict=True)
            for process in [process_rewards(record, episode_rows, self._turn_weights)]
            for parts in [record.criteria(self.criteria) if self.criteria else {}]
        ]
        episodes: list[list[PlayerRewards]] = gather_object(local_episodes)
        rewards: list[float | None] = gather_object([record.reward for record in records])
        players, size = [player for episode in episodes for player in episode], self.train.num_samples_per_problem
        if self.train.shuffle_rewards:
            players = _with_shuffled_outcomes(players, self._seed * 1_000_003 + step)
        groups = [(number // size, player.role) for number, episode in enumerate(episodes) for player in episode]
        process, credit = [player.process for player in players], self.train.turn_credit
        if credit.shuffle:
            process = shuffled(process, self._seed * 1_000_003 + step)
        credits = group_credits(process, groups, credit.mode, credit.gamma, credit.weight)
        if self.criteria:
            outcomes = advantages_per_criterion(players, groups, self.criteria)
        else:
            outcomes = outcome_advantages(players, groups, self.train.scale_rewards)
        all_credits = merged(episodes, credits, outcomes)
        start = accelerator.process_index * len(local_episodes)
        if self.criteria and all(len(episode) == 1 for episode in episodes):
            compared = [[player.criteria.get(name) for (player,) in episodes] for name in self.criteria]
        else:
            compared = [[to_step(reward, self.train.reward_step) for reward in rewards]]
        return (
            all_credits[start : start + len(local_episodes)],
            reward_figures(rewards, size, self.train.scale_rewards, compared),
        )

    def _with_steps(self, player: PlayerRewards) -> PlayerRewards:
        step = self.train.reward_step
        criteria = {name: to_step(value, step) for name, value in player.criteria.items()}
        return replace(player, outcome=to_step(player.outcome, step), criteria=criteria)

    def advantages(
        self, batch: Batch, old: Scores | None, step: int, accelerator: Accelerator
    ) -> tuple[Batch, dict[str, float]]:
        """The batch with its advantages, and figures for the log. GRPO's need no forward pass and are there already.

        Args:
            old: what the policy says of the whole batch before the first step on it, if it was computed.
        """
        return batch, {}

    # The loss -------------------------------------------------------------------------------------------------------

    def start_pass(self, first_pass: bool, step: int) -> None:
        """Called before the first micro-batch of a pass over a batch."""

    def loss(self, scores: Scores, micro: Batch, totals: Totals, first_pass: bool) -> Tensor:
        """A micro-batch's share in the loss of a batch: the policy loss of what the policy sampled, β · KL to the
        reference, and the weighted cross-entropy of the corrections. Each is divided by the number of its own tokens
        (or samples), so more corrections do not thin out the rest."""
        logps, mask = scores.logps_BT, micro.mask_BT
        # Without old log-probs the ratio is 1, and only its gradient counts.
        old = logps.detach() if micro.old_logps_BT is None else micro.old_logps_BT
        micro = self.distilled(micro, old)
        compared = at_sequence_level(logps, old, mask) if self._by_sequence else old
        learned = self._policy_loss(logps, compared, micro.advantages_BT, mask, self.options)
        learned = learned * self.engine_ratio(old, micro, first_pass)
        if micro.ref_logps_BT is not None:
            kl = kl_to_reference(logps, old, micro.ref_logps_BT)
            learned = learned + self.train.beta * kl
            self._means.add("kl", kl, mask)
        if scores.hook_output is not None:
            learned = learned + self.weighted_divergence(scores, micro)
        self._note(scores, compared, micro)
        loss = reduced(learned, mask, self._mean_over, totals, self.options.max_completion_length)
        if self.train.corrections.weight > 0:
            targets = cross_entropy(logps, micro.target_BT, self._temperature) / totals.targets
            loss = loss + self.train.corrections.weight * targets
        return loss

    def distilled(self, micro: Batch, old: Tensor) -> Batch:
        """The micro-batch with weight · (ln π_strong − ln π_old) added to the advantage of every token; as it is where
        distributions are compared.

        That is the gradient of −weight · KL(π ‖ π_strong) at the states that the policy came to, of which the tokens
        that it sampled there are a sample; as in GKD, nothing is learned about which states it comes to (Agarwal et al.
        2024, "On-policy distillation of language models", section 3).
        """
        if micro.strong_logps_BT is None:
            return micro
        log_ratio = micro.strong_logps_BT - old
        self._means.add("distillation/kl", -log_ratio, micro.mask_BT)
        return replace(micro, advantages_BT=micro.advantages_BT + self.train.distillation.weight * log_ratio)

    def weighted_divergence(self, scores: Scores, micro: Batch) -> Tensor:
        """weight · the divergence from the strong tutor, of every token. It is of the policy as it is now, whatever was
        sampled: no ratio corrects it, and the states are again given, as in GKD."""
        divergence_BT = torch.zeros_like(scores.logps_BT).masked_scatter(micro.wanted_BT, scores.hook_output)
        self._means.add("distillation/kl", divergence_BT, micro.mask_BT)
        return self.train.distillation.weight * divergence_BT

    def engine_ratio(self, old: Tensor, micro: Batch, first_pass: bool) -> Tensor | float:
        """The ratios that correct for the difference between the trainer's log-probs and the engine's; 1 if that is
        switched off. The first pass over a batch measures the difference in any case."""
        mode, clip_max = self.train.importance_sampling_mode, self.train.importance_sampling_clip_max
        ratio = importance_ratio(old, micro.sampling_logps_BT, micro.mask_BT, mode, clip_max)
        if first_pass:
            self._mismatch.add(old, micro.sampling_logps_BT, micro.mask_BT, ratio)
        return ratio if self.train.importance_sampling_correction else 1.0

    @torch.no_grad()
    def _note(self, scores: Scores, old: Tensor, micro: Batch) -> None:
        """Add a micro-batch to the figures of its pass."""
        mask = micro.mask_BT
        self._means.add("entropy", scores.entropy_BT, mask)
        if self.train.loss_type == "cispo":
            far = torch.exp(scores.logps_BT - old) > self.options.epsilon_high
            self._means.add("cispo_clip_ratio", far & (micro.advantages_BT > 0), mask)
        elif self.train.loss_type != "sapo":
            below, above = is_clipped(scores.logps_BT, old, micro.advantages_BT, self.options)
            self._means.add("clip_ratio/low_mean", below, mask)
            self._means.add("clip_ratio/high_mean", above, mask)
            self._means.add("clip_ratio/region_mean", below | above, mask)
        self._means.add("corrections/ce_loss", -scores.logps_BT, micro.target_BT)

    def end_pass(self, first_pass: bool, accelerator: Accelerator, trainer: Any) -> dict[str, float]:
        """The figures of a pass over a batch, once all of its micro-batches had their loss; all processes call this
        together, before the optimizer's step."""
        figures, self._means = self._means.means(accelerator), TokenMeans()
        if first_pass:
            figures |= self._mismatch.figures(accelerator.gather)
            self._mismatch = MismatchFigures()
        return figures


def _with_shuffled_outcomes(players: Sequence[PlayerRewards], seed: int) -> list[PlayerRewards]:
    """The same outcomes, permuted over a batch: a control that must teach nothing."""
    order = torch.randperm(len(players), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        replace(player, outcome=players[other].outcome, criteria=players[other].criteria)
        for player, other in zip(players, order, strict=True)
    ]


def reward_figures(
    rewards: Sequence[float | None],
    group_size: int,
    scale: str,
    compared: Sequence[Sequence[float | None]] | None = None,
) -> dict[str, float]:
    """Mean and standard deviation of a batch's rewards, and the share of its episodes whose advantage is 0 because the
    rewards of their group (or, with `batch`, of the whole batch) are all the same; as in TRL, a single one is not.

    Args:
        compared: what is compared in place of the rewards, such as each criterion of all episodes.
    """
    scored = [reward for reward in rewards if reward is not None]
    if not scored:
        return {}
    size = len(rewards) if scale == BY_BATCH else group_size
    flat = [
        all(_are_the_same(values[start : start + size]) for values in compared or [rewards])
        for start in range(0, len(rewards), size)
    ]
    return {
        "reward": fmean(scored),
        "reward_std": stdev(scored) if len(scored) > 1 else 0.0,
        "frac_reward_zero_std": fmean(flat),
    }


def _are_the_same(rewards: Sequence[float | None]) -> bool:
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) > 1 and stdev(scored) <= 1e-8
