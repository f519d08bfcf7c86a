"""The rows of a batch beside its conversations, and the credit of every token: what supervision adds to a step, and
what environments need in which every message has a prompt of its own.

Rows come from the rank that sampled their conversation. Each rank pads its own to the same number, because all ranks
compute together and TRL cuts a batch into equal parts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from accelerate import Accelerator
from accelerate.utils import gather_object

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import turn_reward_weights
from classroom_rl.config.values import CHANGED, NO_CREDIT, SAME_STEP
from classroom_rl.rollout.environment import most_rows
from classroom_rl.rollout.rows import CORRECTION, DRAFT, NO_MESSAGE, POLICY, TrainingRow, rows_of
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.turn_advantages import (
    Credits,
    PlayerRewards,
    by_player,
    group_credits,
    merged,
    outcome_advantages,
    process_rewards,
    shuffled,
)

ROWS = "rows"
"""The rollout column of what supervision adds to each conversation, a `ConversationRows`."""


@dataclass(frozen=True)
class RowBeside:
    """A row beside a conversation.

    Attributes:
        row: the row.
        credit: what every token of it gets beside its conversation's outcome.
        has_outcome: whether its tokens get the conversation's outcome advantage, because the message went into it.
    """

    row: TrainingRow
    credit: float = 0.0

    @property
    def has_outcome(self) -> bool:
        return self.row.kind == POLICY


@dataclass(frozen=True)
class ConversationRows:
    """What is trained on of one conversation.

    Attributes:
        token_credit: the credit of each of its completion tokens.
        beside: the rows beside it.
        has_outcome: whether its tokens get the conversation's outcome advantage; False if the policy played several
            players, whose own outcomes are in the credits.
    """

    token_credit: list[float]
    beside: list[RowBeside]
    has_outcome: bool = True


class RowPlanner:
    """Finds the rows of each batch: one `ConversationRows` for each conversation.

    Args:
        config: turn credit, corrections, and the size of a group.
    """

    column = ROWS

    def __init__(self, config: TrainRLConfig):
        train = config.train
        self._credit, self._corrections = train.turn_credit, train.corrections
        self._weights = turn_reward_weights(config)
        self._group_size = train.num_samples_per_problem
        self._conversations = train.number_of_problems_per_batch * train.num_samples_per_problem
        self._seed = config.seed
        self._scale_rewards = train.scale_rewards
        self._has_rows = config.supervisor_model is not None or most_rows(config) is not None

    @property
    def is_needed(self) -> bool:
        """Whether a batch may have anything besides its conversations: rows, or credit of single messages."""
        return self._has_rows or self._credit.mode != NO_CREDIT

    @property
    def _mixes_corrections(self) -> bool:
        return self._corrections.mode == SAME_STEP and self._corrections.weight > 0

    def plan(self, accelerator: Accelerator, records: Sequence[Trajectory], step: int) -> list[ConversationRows]:
        """The rows of this rank's conversations; all ranks call this together."""
        rows = [[self._with_targets(row) for row in rows_of(record)] for record in records]
        kept = self._kept_corrections(accelerator, rows, step)
        credits = self._credits(accelerator, records, rows, step)
        return [
            _conversation_rows(
                own,
                credit,
                {place for number, place in kept if number == index},
                self._learns_drafts,
                has_outcome=not record.players,
            )
            for index, (record, own, credit) in enumerate(zip(records, rows, credits, strict=True))
        ]

    def _with_targets(self, row: TrainingRow) -> TrainingRow:
        """The row with the targets that are to be trained on."""
        if self._corrections.targets != CHANGED or not row.unchanged:
            return row
        start = row.target.index(1)
        end = start + row.unchanged
        return replace(row, target=[0] * end + row.target[end:])

    @property
    def _learns_drafts(self) -> bool:
        return self._credit.mode != NO_CREDIT

    def _kept_corrections(
        self, accelerator: Accelerator, rows: Sequence[Sequence[TrainingRow]], step: int
    ) -> set[tuple[int, int]]:
        """The corrections that are mixed into this step, as (conversation, row): all, or as many as may be, drawn."""
        if not self._mixes_corrections:
            return set()
        found = [
            (number, place)
            for number, own in enumerate(rows)
            for place, row in enumerate(own)
            if row.kind == CORRECTION
        ]
        most = self._corrections.rows_per_batch or self._conversations
        share = max(1, most // accelerator.num_processes)
        draw = random.Random(f"{self._seed}|{step}|{accelerator.process_index}|corrections")
        return set(found if len(found) <= share else draw.sample(found, share))

    def _credits(
        self,
        accelerator: Accelerator,
        records: Sequence[Trajectory],
        rows: Sequence[Sequence[TrainingRow]],
        step: int,
    ) -> list[Credits]:
        own = [
            by_player(process_rewards(record, each, self._weights), record.players)
            for record, each in zip(records, rows, strict=True)
        ]
        everyone: list[list[PlayerRewards]] = gather_object(own)
        players = [player for each in everyone for player in each]
        groups = [(number // self._group_size, player.role) for number, each in enumerate(everyone) for player in each]
        process = [player.process for player in players]
        if self._credit.shuffle:
            process = shuffled(process, self._seed * 1_000_003 + step)
        credit = self._credit
        credits = group_credits(process, groups, credit.mode, credit.gamma, credit.weight)
        outcomes = outcome_advantages(players, groups, self._scale_rewards)
        found = merged(everyone, credits, outcomes)
        start = accelerator.process_index * len(own)
        return found[start : start + len(own)]


def _conversation_rows(
    rows: Sequence[TrainingRow],
    credits: Credits,
    corrections: set[int],
    learns_drafts: bool,
    has_outcome: bool = True,
) -> ConversationRows:
    whole, *_ = rows
    token_credit = [0.0 if number == NO_MESSAGE else credits.messages[number] for number in whole.messages]
    beside, of_drafts = [], iter(credits.beside)
    for place, row in enumerate(rows[1:], start=1):
        credit = 0.0
        if row.kind == DRAFT:
            credit = next(of_drafts)
        elif row.kind == POLICY:  # the message itself, which was written in another context
            credit = credits.messages[row.message]
        if row.kind == POLICY or (row.kind == DRAFT and learns_drafts) or place in corrections:
            beside.append(RowBeside(row, credit))
    return ConversationRows(token_credit, beside, has_outcome)


def padding_row(token: int) -> TrainingRow:
    """A row that nothing is learned from."""
    return TrainingRow("", CORRECTION, None, [token], [token], [0], [0], [0.0], [NO_MESSAGE])


def padded(rows: Sequence[RowBeside], conversations: int, parts: int, accelerator: Accelerator, token: int) -> list:
    """This rank's rows, with as many padding rows as all ranks need to have the same number, which together with the
    conversations divides into `parts`; all ranks call this together. Empty if no rank has any."""
    most = max(gather_object([len(rows)]))
    if most == 0:
        return []
    whole = -(-(conversations + most) // parts) * parts - conversations
    return [*rows, *(RowBeside(padding_row(token)) for _ in range(whole - len(rows)))]
