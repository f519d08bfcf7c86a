"""Draws the problems of each batch by how much they last taught, in place of the order of the dataset."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import pstdev

from accelerate import Accelerator
from accelerate.utils import gather_object

from classroom_rl.results.rollout_files import ConversationReward, read_rewards
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.collective import on_main_process

_LEAST_WEIGHT = 0.05
"""The weight of a problem that taught nothing and was played just now: nothing is given up for ever."""


@dataclass(frozen=True)
class LastPlayed:
    """When a problem was last played, and how far the rewards of its group were apart then (standard deviation)."""

    step: int
    spread: float


@dataclass
class Curriculum:
    """Problems with a large spread of rewards come first: GRPO learns from the differences inside a group, and for a
    reward of 0 or 1 they are largest where half of the conversations succeed. The longer a problem has not been played,
    the more it weighs, so that forgotten ones return. A problem that was never played weighs more than any other.

    Args:
        problem_ids: all problems.
        group_size: conversations for each problem.
        run_folder: what a resumed training reads the rewards of the steps before from.
        steps_of_batch: optimizer steps on each batch.
    """

    problem_ids: Sequence[str]
    group_size: int
    seed: int
    run_folder: Path
    steps_of_batch: int = 1
    _last: dict[str, LastPlayed] | None = field(default=None, init=False)

    def choose(self, accelerator: Accelerator, conversations: int, step: int) -> list[str]:
        """The problems of this rank's conversations in a step; all ranks call this together. The same after a restart.

        Args:
            conversations: how many conversations this rank plays; all play as many.
        """
        if self._last is None:
            self._last = on_main_process(accelerator, lambda: last_played(read_rewards(self.run_folder), step))
        count = -(-conversations * accelerator.num_processes // self.group_size)
        problems = self.draw(step, count)
        first = accelerator.process_index * conversations
        return [problems[(first + index) // self.group_size] for index in range(conversations)]

    def draw(self, step: int, count: int) -> list[str]:
        """Draw problems by their weight, each once while there are enough (Efraimidis and Spirakis, "Weighted random
        sampling with a reservoir", 2006)."""
        rng = random.Random(f"{self.seed}|{step}|curriculum")
        weights = self.weights(step, count)
        problems: list[str] = []
        while len(problems) < count:
            keys = {problem: rng.random() ** (1 / weights[problem]) for problem in self.problem_ids}
            problems += sorted(keys, key=keys.__getitem__, reverse=True)[: count - len(problems)]
        return problems

    def weights(self, step: int, count: int) -> dict[str, float]:
        """The weight of each problem, above 0: its spread as a share of the largest, plus the passes over all problems
        that could have been made since it was played; for one that was never played, more than all others.

        Args:
            count: problems in a batch.
        """
        last = self._last or {}
        largest = max((played.spread for played in last.values()), default=0.0) or 1.0
        passes = count / len(self.problem_ids) / self.steps_of_batch
        ages = {problem: max(step - played.step - self.steps_of_batch, 0) for problem, played in last.items()}
        weights = {
            problem: _LEAST_WEIGHT + played.spread / largest + ages[problem] * passes
            for problem, played in last.items()
        }
        unplayed_weight = 2 * max(weights.values(), default=0.5)
        return {problem: weights.get(problem, unplayed_weight) for problem in self.problem_ids}

    def record(self, step: int, records: Sequence[Trajectory]) -> dict[str, float]:
        """Remember what a batch's groups were like, and return figures for the log; all ranks call this together."""
        rewards = gather_object([ConversationReward(step, record.problem_id, record.reward) for record in records])
        self._last = {**(self._last or {}), **last_played(rewards, step + 1)}
        return {"curriculum/seen_share": len(self._last) / len(self.problem_ids)}


def last_played(rewards: Sequence[ConversationReward], before: int) -> dict[str, LastPlayed]:
    """When each problem was last played before a step, from the rewards of conversations; those without a reward do not
    count for the spread."""
    groups: dict[tuple[str, int], list[float]] = {}
    for conversation in rewards:
        if conversation.step < before:
            groups.setdefault((conversation.problem_id, conversation.step), [])
            if conversation.reward is not None:
                groups[conversation.problem_id, conversation.step].append(conversation.reward)
    last_by_problem: dict[str, LastPlayed] = {}
    for (problem, step), values in sorted(groups.items(), key=lambda group: group[0][1]):
        last_by_problem[problem] = LastPlayed(step, pstdev(values) if values else 0.0)
    return last_by_problem
