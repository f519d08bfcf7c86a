"""Online direct preference optimization (Guo et al. 2024, "Direct language model alignment from online AI feedback"):
of each group that GRPO plays, the conversations with the best and the worst reward are a pair."""

from collections.abc import Sequence, Set
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import logsigmoid

from classroom_rl.rollout.rows import POLICY, rows_of
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.advantages import to_step
from classroom_rl.trainer.batch import Batch, Sample, Totals
from classroom_rl.trainer.group_variance import varies
from classroom_rl.trainer.grpo import GRPO, reward_figures
from classroom_rl.trainer.log_probs import Scores

_IN_NO_PAIR = (0, 0)


class OnlineDPO(GRPO):
    """The mean of −ln σ(βm) over the pairs of a batch (Rafailov et al. 2023, equation 7), where m is ln(π/π_reference)
    of the better conversation minus that of the worse one. Each is a sum over the tokens that the policy sampled, as in
    TRL's trainers; what the student says is given.

    The gradient of a pair is −βσ(−βm) · (∇ ln π(better) − ∇ ln π(worse)). A batch has one step, and m is known before
    it: so −A · ln π with A = ±βσ(−βm) has this gradient, whatever micro-batch and process the two conversations are in.
    """

    needs_old_log_probs = True
    _pairs: int  # of all processes
    _places: list[tuple[int, int]]  # of the samples, as in `pairs_of`

    def samples(
        self, records: Sequence[Trajectory], left_out: Set[int], step: int, accelerator: Accelerator
    ) -> tuple[list[Sample], dict[str, float]]:
        """What the policy sampled in the conversations of pairs; at least one sample, because all processes compute
        together. The advantages come later."""
        size, first = self.train.num_samples_per_problem, accelerator.process_index * len(records)
        rewards = self.outcomes(records, step)
        compared = [to_step(reward, self.train.reward_step) for reward in rewards]
        are_out = gather_object([index in left_out for index in range(len(records))])
        pairs = pairs_of([None if out else value for value, out in zip(compared, are_out, strict=True)], size)
        self._pairs = sum(side > 0 for _, side in pairs)
        rows = [
            (row, pair)
            for record, pair in zip(records, pairs[first : first + len(records)], strict=True)
            for row in rows_of(record)
            if pair != _IN_NO_PAIR and row.kind == POLICY
        ] or [(rows_of(records[0])[0], _IN_NO_PAIR)]
        self._places = [pair for _, pair in rows]
        figures = reward_figures(rewards, size, self.train.scale_rewards, [compared])
        figures["online_dpo/groups_without_pair"] = len(pairs) // size - self._pairs
        return [Sample(row, [0.0] * len(row.mask), pair != _IN_NO_PAIR) for row, pair in rows], figures

    def advantages(self, batch: Batch, old: Scores, step: int, accelerator: Accelerator) -> tuple[Batch, dict]:
        """The batch with A = ±βσ(−βm), and figures of all pairs: the loss, the mean of βm, and the share of pairs in
        which it is positive; one of 0 counts half."""
        if not self._pairs:
            return batch, {}
        beta, (pairs_B, sides_B) = self.train.online_dpo.beta, torch.tensor(self._places, device=old.logps_BT.device).T
        ratios_B = torch.where(batch.mask_BT, old.logps_BT - batch.ref_logps_BT, 0.0).sum(dim=1)
        margins = ratios_B.new_zeros(self._pairs).index_add(0, pairs_B, sides_B * ratios_B)
        rewards = beta * accelerator.reduce(margins, reduction="sum")
        advantages_B = sides_B * (beta * torch.sigmoid(-rewards))[pairs_B]
        return replace(batch, advantages_BT=advantages_B.unsqueeze(1) * batch.mask_BT), {
            "online_dpo/loss": -logsigmoid(rewards).mean().item(),
            "online_dpo/reward_margin": rewards.mean().item(),
            "online_dpo/reward_accuracy": (0.5 + 0.5 * rewards.sign()).mean().item(),
        }

    def loss(self, scores: Scores, micro: Batch, totals: Totals, first_pass: bool) -> Tensor:
        """A micro-batch's share in the mean over pairs of −A · ln π, which has the gradient of the loss and not its
        value. The engine's log-probs are only compared: the loss is one of pairs, whoever sampled them."""
        self.engine_ratio(micro.old_logps_BT, micro, first_pass)
        self._means.add("entropy", scores.entropy_BT, micro.mask_BT)
        return -(micro.advantages_BT * scores.logps_BT).sum() / max(self._pairs, 1)


def pairs_of(rewards: Sequence[float | None], group_size: int) -> list[tuple[int, int]]:
    """For each conversation the number of its pair, and 1 for the better one of it, −1 for the worse one; (0, 0) if it
    is in none. The rewards are given group by group; a conversation whose reward is None is in no pair. Of equal
    rewards the first one is taken, and a group in which all are equal has no pair."""
    pairs, count = [_IN_NO_PAIR] * len(rewards), 0
    for start in range(0, len(rewards), group_size):
        group_rewards = {
            index: rewards[index] for index in range(start, start + group_size) if rewards[index] is not None
        }
        if varies(list(group_rewards.values())):
            pairs[max(group_rewards, key=group_rewards.__getitem__)] = (count, 1)
            pairs[min(group_rewards, key=group_rewards.__getitem__)] = (count, -1)
            count += 1
    return pairs
