"""What PPO has to know of a conversation besides its tokens: which message a token belongs to, the reward of single
messages, whether the conversation was cut, and the rows of messages that have a prompt of their own.

In all shapes, R is the number of a rank's rows, T the longest completion in tokens, E the number of its episodes, and L
the most tokens of an episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import turn_reward_weights
from classroom_rl.errors import DataError
from classroom_rl.rollout.rows import POLICY, TrainingRow, rows_of
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.batch_builder import ConversationRows, RowBeside
from classroom_rl.trainer.ppo.advantages import NO_STEP
from classroom_rl.trainer.turn_advantages import ProcessRewards, process_rewards, shuffled


@dataclass(frozen=True)
class EpisodeTokens:
    """The tokens of all episodes, one after the other.

    Attributes:
        rows, places: the row of each token and its place in it, of shape (E, L).
        there: false for padding, of shape (E, L).
    """

    rows: Tensor
    places: Tensor
    there: Tensor

    @classmethod
    def of(cls, episodes: Sequence[Sequence[int]], lengths: Tensor) -> "EpisodeTokens":
        """The tokens of episodes, each given by its rows in order.

        Args:
            lengths: the number of completion tokens of each row, of shape (R,).
        """
        known, device = lengths.tolist(), lengths.device
        rows = [torch.tensor([row for row in own for _ in range(known[row])], device=device) for own in episodes]
        places = [torch.cat([torch.arange(known[row], device=device) for row in own]) for own in episodes]
        there = pad_sequence([torch.ones_like(each, dtype=torch.bool) for each in places], batch_first=True)
        return cls(pad_sequence(rows, batch_first=True).long(), pad_sequence(places, batch_first=True), there)

    def joined(self, tokens: Tensor, empty: float) -> Tensor:
        """Values of shape (R, T) as episodes, of shape (E, L), with `empty` as padding."""
        found = tokens[self.rows, self.places]
        return torch.where(self.there, found, torch.full_like(found, empty))

    def apart(self, joined: Tensor, length: int, rows: int) -> Tensor:
        """Values of episodes as rows, of shape (rows, length); 0 where no episode has a token."""
        found = joined.new_zeros(rows, length)
        found[self.rows[self.there], self.places[self.there]] = joined[self.there]
        return found


@dataclass(frozen=True)
class EpisodeSteps:
    """The steps of one conversation, for each of its rows: its own one first, then those beside it in the order of
    their messages.

    Attributes:
        messages: the number of the message that each completion token of a row belongs to, from 0; `NO_STEP` for tokens
            that were not sampled.
        process: the reward of a message at its last sampled token, 0 elsewhere.
        truncated: whether the conversation was cut before its end.
        rows: the rows beside the conversation.
    """

    messages: list[list[int]]
    process: list[list[float]]
    truncated: bool
    rows: ConversationRows


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
    rows = [row for row in rows_of(record) if row.kind == POLICY]
    messages = [_messages_of(record, row) for row in rows]
    last = {
        number: (place, token)
        for place, own in enumerate(messages)
        for token, number in enumerate(own)
        if number != NO_STEP
    }
    known = {number: rewards.messages[number] for number in last if rewards.messages[number] is not None}
    process = [[0.0] * len(own) for own in messages]
    for number, reward in known.items():
        place, token = last[number]
        process[place][token] = weight * reward / len(known)
    beside = [RowBeside(row) for row in rows[1:]]
    return EpisodeSteps(messages, process, record.truncated, ConversationRows([0.0] * len(messages[0]), beside))


def _messages_of(record: Trajectory, row: TrainingRow) -> list[int]:
    found = [number if own else NO_STEP for number, own in zip(row.messages, row.mask, strict=True)]
    if any(own and number == NO_STEP for number, own in zip(found, row.mask, strict=True)):
        raise DataError(f"{record.id}: a token that the policy sampled is in no message's span.")
    return found


def step_tensors(
    steps: Sequence[EpisodeSteps], rows: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`messages` and `process` of shape (rows, length), and `truncated` of shape (E,). The rows are those of TRL's
    batch: the E conversations, then the rows beside them, then padding."""

    def padded(of_rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
        filled = [[*row, *[value] * (length - len(row))] for row in of_rows]
        filled += [[value] * length] * (rows - len(filled))
        return torch.tensor(filled, dtype=dtype, device=device)

    def in_order(of: str) -> list[list]:
        found = [getattr(each, of) for each in steps]
        return [own[0] for own in found] + [row for own in found for row in own[1:]]

    messages = padded(in_order("messages"), NO_STEP, torch.long)
    process = padded(in_order("process"), 0.0, torch.float32)
    return messages, process, torch.tensor([each.truncated for each in steps], device=device)


def rows_by_episode(steps: Sequence[EpisodeSteps]) -> list[list[int]]:
    """The rows of each conversation among those of the batch, in the order of its messages."""
    found, start = [], len(steps)
    for place, each in enumerate(steps):
        count = len(each.messages) - 1
        found.append([place, *range(start, start + count)])
        start += count
    return found
