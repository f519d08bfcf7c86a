"""Groups that teach nothing, because all of their conversations have the same reward: found, left out, or played again
with further problems. GRPO's advantage is the distance from a group's mean, so it is 0 in such a group."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import pstdev

from accelerate import Accelerator
from accelerate.utils import gather_object

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import criterion_weights
from classroom_rl.config.values import RESAMPLE
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.engine import Usage
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.advantages import to_step

_SAME = 1e-6
"""Rewards whose standard deviation is below this are the same."""


def further_problems(key: str, ids: Sequence[str], played: Sequence[str], count: int) -> list[str]:
    """Draw problems that were not played in this step; if there are too few, others again. The same on all ranks, and
    after a restart.

    Args:
        key: seed, step and attempt; equal keys draw the same.
        ids: the ids of all problems.
        played: the ids of those that were played.
    """
    rng, tried = random.Random(f"{key}|further problems"), set(played)
    fresh = [problem_id for problem_id in ids if problem_id not in tried]
    drawn = rng.sample(fresh, min(count, len(fresh)))
    return drawn + rng.choices(ids, k=count - len(drawn))


def varies(rewards: Sequence[float | None]) -> bool:
    """Whether rewards differ, by their standard deviation; those that are missing do not count."""
    known = [reward for reward in rewards if reward is not None]
    return len(known) > 1 and pstdev(known) > _SAME


def _by_message(group: Sequence[Trajectory], name: str) -> list[list[float | None]]:
    """The numbers of messages with a reward, on which discounted credits depend; then the rewards of the group's first
    messages, of its second ones, and so on."""
    rewards = [record.turn_rewards.get(name, []) for record in group]
    by_index = [[values[index] for values in rewards if index < len(values)] for index in range(max(map(len, rewards)))]
    return [[float(len(values)) for values in rewards], *by_index]


@dataclass
class PlayedBatch:
    """This rank's part of a batch.

    Attributes:
        records: the conversations, group by group.
        left_out: the places of those that are not trained on.
        usage: what each request used of the roles' APIs.
        played: everything that was played for it, the conversations that others took the place of included.
        figures: metrics for the log.
    """

    records: list[Trajectory]
    usage: list[Mapping[str, Usage]]
    played: list[Trajectory]
    left_out: frozenset[int] = frozenset()
    figures: dict[str, float] = field(default_factory=dict)


Play = Callable[[Sequence[str], int], tuple[Sequence[Trajectory], Mapping[str, Usage]]]
"""Plays a conversation for each problem id of this rank, which may be none; its second argument is the number of the
attempt. All ranks call it together."""


class GroupFilter:
    """Leaves groups without variance out of a batch, or has further problems played in their place
    (`train.groups_without_variance`).

    Args:
        problem_ids: the ids of all problems.
    """

    def __init__(self, config: TrainRLConfig, problem_ids: Sequence[str]):
        self._train, self._seed, self._ids = config.train, config.seed, problem_ids
        self._criteria = criterion_weights(config)

    def apply(self, accelerator: Accelerator, batch: PlayedBatch, step: int, tried: Sequence[str], play: Play) -> None:
        """Replace groups of a batch, or mark them as left out; all ranks call this together.

        Args:
            tried: the problems of this rank's part of the batch.
        """
        size, flat = self._train.num_samples_per_problem, self.flat_groups(batch.records)
        resamples = self._train.groups_without_variance == RESAMPLE
        missing, offset = of_all_ranks(len(flat), accelerator)
        groups = played = sum(gather_object([len(batch.records) // size]))
        batch.figures["groups/without_variance"] = missing / groups
        played_ids, attempt = gather_object([*tried]), 0
        while resamples and missing and played + missing <= self._train.resample_up_to * groups:
            attempt += 1
            drawn = further_problems(f"{self._seed}|{step}|{attempt}", self._ids, played_ids, missing)
            own_problems = drawn[offset : offset + len(flat)]
            records, usage = play([problem for problem in own_problems for _ in range(size)], attempt)
            for index, group in enumerate(flat):
                batch.records[group * size : (group + 1) * size] = records[index * size : (index + 1) * size]
            batch.usage.append(usage)
            batch.played += records
            played_ids, played = [*played_ids, *drawn], played + missing
            flat = self.flat_groups(batch.records)
            missing, offset = of_all_ranks(len(flat), accelerator)
        left_out = missing if missing < groups else 0  # a batch with nothing in it cannot be averaged over
        if left_out:
            batch.left_out = frozenset(group * size + index for group in flat for index in range(size))
        batch.figures |= {"groups/left_out": left_out / groups, "groups/played": played}

    def flat_groups(self, records: Sequence[Trajectory]) -> list[int]:
        """The indices of the groups without variance. A group with other rewards for its messages does teach, if those
        count.

        Args:
            records: whole groups, one after the other.

        Raises:
            ConfigError: if they are not, under a launcher that did not say before how many processes there are.
        """
        size = self._train.num_samples_per_problem
        if len(records) % size:
            raise ConfigError(
                f"This process plays {len(records)} conversations, which are not whole groups of {size}. Make "
                "train.number_of_problems_per_batch a multiple of the number of processes, or set "
                "train.groups_without_variance=keep."
            )
        groups = [records[start : start + size] for start in range(0, len(records), size)]
        return [index for index, group in enumerate(groups) if not self._teaches(group)]

    def _teaches(self, group: Sequence[Trajectory]) -> bool:
        if self._criteria:
            scores = [record.criteria(self._criteria) for record in group]
            compared = [[score.get(name) for score in scores] for name in self._criteria]
        else:
            compared = [[record.reward for record in group]]
        return any(varies([to_step(value, self._train.reward_step) for value in values]) for values in compared) or any(
            varies(values)
            for name, weight in self._train.turn_credit.weights.items()
            if weight
            for values in _by_message(group, name)
        )


def of_all_ranks(count: int, accelerator: Accelerator) -> tuple[int, int]:
    """How many of something all ranks have, and how many of these earlier ranks have; all ranks call this together."""
    counts = gather_object([count])
    return sum(counts), sum(counts[: accelerator.process_index])
