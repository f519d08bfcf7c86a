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
from classroom_rl.config.values import KEEP, RESAMPLE
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.engine import Usage
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.advantages import to_step

_SAME = 1e-6
"""Rewards whose standard deviation is below this are the same."""


@dataclass(frozen=True)
class FurtherProblems:
    """The problems that replace those of groups without variance.

    Args:
        ids: the ids of all problems.
    """

    ids: Sequence[str]
    seed: int

    def draw(self, step: int, attempt: int, played: Sequence[str], count: int) -> list[str]:
        """Draw problems that were not played in this step; if there are too few, others again. The same on all ranks,
        and after a restart."""
        rng = random.Random(f"{self.seed}|{step}|{attempt}|further problems")
        tried = set(played)
        fresh = [problem_id for problem_id in self.ids if problem_id not in tried]
        drawn = rng.sample(fresh, min(count, len(fresh)))
        return drawn + rng.choices(self.ids, k=count - len(drawn))


def varies(rewards: Sequence[float | None]) -> bool:
    """Whether rewards differ, by their standard deviation; those that are missing do not count."""
    known = [reward for reward in rewards if reward is not None]
    return len(known) > 1 and pstdev(known) > _SAME


@dataclass(frozen=True)
class GroupVariance:
    """Decides whether a group teaches anything.

    Attributes:
        group_size: conversations of a group.
        turn_rewards: the rewards of single messages that count, and their weights.
        criteria: the weights of what is compared one by one in place of the reward.
        reward_step: what rewards are rounded to before they are compared.
    """

    group_size: int
    turn_rewards: Mapping[str, float]
    criteria: Mapping[str, float] = field(default_factory=dict)
    reward_step: float | None = None

    def flat_groups(self, records: Sequence[Trajectory]) -> list[int]:
        """The places of this rank's groups without variance, from 0.

        A group with other rewards for its messages does teach, if those count.

        Raises:
            ConfigError: if the rank holds parts of groups.
        """
        if len(records) % self.group_size:
            raise ConfigError(
                f"This process plays {len(records)} conversations, which are not whole groups of {self.group_size}. "
                "Make train.number_of_problems_per_batch a multiple of the number of processes, or keep groups without "
                "variance (train.groups_without_variance=keep)."
            )
        groups = [records[start : start + self.group_size] for start in range(0, len(records), self.group_size)]
        return [index for index, group in enumerate(groups) if not self._teaches(group)]

    def _teaches(self, group: Sequence[Trajectory]) -> bool:
        if self.criteria:
            scores = [record.criteria(self.criteria) for record in group]
            compared = [[score.get(name) for score in scores] for name in self.criteria]
        else:
            compared = [[record.reward for record in group]]
        return any(varies([to_step(value, self.reward_step) for value in values]) for values in compared) or any(
            varies(values)
            for name, weight in self.turn_rewards.items()
            if weight
            for values in _by_message(group, name)
        )


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


@dataclass(frozen=True)
class GroupFilter:
    """Leaves groups without variance out of a batch, or has further problems played in their place.

    Attributes:
        problems: what replaces them; None if nothing does.
        most: how many groups may be played for one of the batch.
    """

    variance: GroupVariance
    problems: FurtherProblems | None
    most: float

    @classmethod
    def of(cls, config: TrainRLConfig, problem_ids: Sequence[str]) -> "GroupFilter | None":
        """The filter of a configuration; None if all groups are kept."""
        train = config.train
        if train.groups_without_variance == KEEP:
            return None
        resamples = train.groups_without_variance == RESAMPLE
        further = FurtherProblems(problem_ids, config.seed) if resamples else None
        variance = GroupVariance(
            train.num_samples_per_problem,
            config.train.turn_credit.weights,
            criterion_weights(config),
            train.reward_step,
        )
        return cls(variance, further, train.resample_up_to)

    def apply(self, accelerator: Accelerator, batch: PlayedBatch, step: int, tried: Sequence[str], play: Play) -> None:
        """Replace groups of a batch, or mark them as left out; all ranks call this together.

        Args:
            tried: the problems of this rank's part of the batch.
        """
        size, flat = self.variance.group_size, self.variance.flat_groups(batch.records)
        missing, offset = of_all_ranks(len(flat), accelerator)
        groups = played = sum(gather_object([len(batch.records) // size]))
        batch.figures["groups/without_variance"] = missing / groups
        played_ids, attempt = gather_object([*tried]), 0
        while self.problems is not None and missing and played + missing <= self.most * groups:
            attempt += 1
            drawn = self.problems.draw(step, attempt, played_ids, missing)
            own_problems = drawn[offset : offset + len(flat)]
            records, usage = play([problem for problem in own_problems for _ in range(size)], attempt)
            for index, group in enumerate(flat):
                batch.records[group * size : (group + 1) * size] = records[index * size : (index + 1) * size]
            batch.usage.append(usage)
            batch.played += records
            played_ids, played = [*played_ids, *drawn], played + missing
            flat = self.variance.flat_groups(batch.records)
            missing, offset = of_all_ranks(len(flat), accelerator)
        left_out = missing if missing < groups else 0  # a batch with nothing in it cannot be averaged over
        if left_out:
            batch.left_out = frozenset(group * size + index for group in flat for index in range(size))
        batch.figures |= {"groups/left_out": left_out / groups, "groups/played": played}


def of_all_ranks(count: int, accelerator: Accelerator) -> tuple[int, int]:
    """How many of something all ranks have, and how many of these earlier ranks have; all ranks call this together."""
    counts = gather_object([count])
    return sum(counts), sum(counts[: accelerator.process_index])
