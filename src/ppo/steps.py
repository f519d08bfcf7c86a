"""What PPO has to know of a conversation besides its tokens: which message a token belongs to, the reward of single
messages, and whether the conversation was cut."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from config.supervision_checks import turn_reward_weights
from config.train_rl_model import TrainRLConfig
from src.errors import DataError
from src.ppo.advantages import NO_STEP
from src.rollout.rows import rows_of
from src.rollout.trajectory import Trajectory
from src.training.turn_credit import ProcessRewards, process_rewards, shuffled


@dataclass(frozen=True)
class EpisodeSteps:
    """The steps of one conversation; the lists have one entry per completion token.

    Attributes:
        messages: the number of the message that a sampled token belongs to, from 0; `NO_STEP` for all others.
        process: the reward of a message at its last sampled token, 0 elsewhere.
        truncated: whether the conversation was cut because a context was full.
    """

    messages: list[int]
    process: list[float]
    truncated: bool


class StepPlanner:
    """Finds the steps of each batch; the rollout puts them into a column of its own."""

    column = "ppo_steps"

    def __init__(self, config: TrainRLConfig):
        self._credit = config.train.turn_credit
        self._weights = turn_reward_weights(config)
        self._seed = config.seed

    def plan(self, accelerator: Accelerator, records: Sequence[Trajectory], step: int) -> list[EpisodeSteps]:
        """The steps of this rank's conversations; all ranks call this together."""
        rewards = [process_rewards(record, rows_of(record), self._weights) for record in records]
        if self._credit.shuffle:
            start = accelerator.process_index * len(rewards)
            everyone = shuffled(gather_object(rewards), self._seed * 1_000_003 + step)
            rewards = everyone[start : start + len(rewards)]
        weight = self._credit.weight
        return [steps_of(record, own, weight) for record, own in zip(records, rewards, strict=True)]


def steps_of(record: Trajectory, rewards: ProcessRewards, weight: float) -> EpisodeSteps:
    """The steps of a conversation. Its process rewards add up to `weight` times their mean over its messages: with a
    sum, long lessons would look bad.

    Raises:
        DataError: if a sampled token belongs to no message.
    """
    row = rows_of(record)[0]
    messages = [number if own else NO_STEP for number, own in zip(row.messages, row.mask, strict=True)]
    if any(own and number == NO_STEP for number, own in zip(messages, row.mask, strict=True)):
        raise DataError(f"{record.id}: a token that the policy sampled is in no message's span.")
    last = {number: place for place, number in enumerate(messages) if number != NO_STEP}
    known = {number: rewards.messages[number] for number in last if rewards.messages[number] is not None}
    process = [0.0] * len(messages)
    for number, reward in known.items():
        process[last[number]] = weight * reward / len(known)
    return EpisodeSteps(messages, process, record.overflow is not None)


def step_tensors(steps: Sequence[EpisodeSteps], length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`messages` and `process` of shape (R, length), and `truncated` of shape (R,)."""

    def padded(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
        filled = [[*row, *[value] * (length - len(row))] for row in rows]
        return torch.tensor(filled, dtype=dtype, device=device)

    messages = padded([each.messages for each in steps], NO_STEP, torch.long)
    process = padded([each.process for each in steps], 0.0, torch.float32)
    return messages, process, torch.tensor([each.truncated for each in steps], device=device)
