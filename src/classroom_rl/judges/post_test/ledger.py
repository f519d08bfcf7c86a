"""The ledger of a lesson: for each item that the lesson teaches, whether the student produced it before the teacher
had given it away.

The ledger is a pure function of the messages. It uses what each side can see of the other, so thoughts do not count. A
message of the teacher can only remove evidence: an item that it gives away stays so for the rest of the lesson, and
whether the student produced an item never depends on what the teacher asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from classroom_rl.config.values import CORRECT_PERSONA, ERROR_PERSONA
from classroom_rl.judges.messages import spoken
from classroom_rl.rollout.post_test import GIVEN, MISSED, PRODUCED, LedgerEntry
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn


class Item(Protocol):
    """One item that a lesson teaches, such as a phrase. `name` and `cue` are as in `LedgerEntry`."""

    name: str
    cue: str

    def is_produced(self, text: str) -> bool:
        """Whether a student's message contains the item."""

    def is_attempted(self, text: str) -> bool:
        """Whether a student's message, which does not contain the item, is an attempt at it."""

    def is_given(self, text: str, said: Sequence[str]) -> bool:
        """Whether a teacher's message gives the item away to a student whose messages so far are `said`."""


@dataclass
class _ItemState:
    """The state of one item while the messages are processed in order.

    Attributes:
        outcome: `MISSED` until the item was produced or given.
        turn: the index of the message that decided the outcome.
        knew: whether the student knew the item before the lesson; None if unknown.
        attempted: whether the student has already said or attempted the item.
    """

    item: Item
    outcome: str = MISSED
    turn: int | None = None
    knew: bool | None = None
    attempted: bool = False

    def read_teacher(self, text: str, said: Sequence[str], index: int) -> None:
        if self.outcome == MISSED and self.item.is_given(text, said):
            self.outcome, self.turn = GIVEN, index

    def read_student(self, text: str, turn: Turn, index: int, taught: bool) -> None:
        produced = self.item.is_produced(text)
        if not self.attempted and (produced or self.item.is_attempted(text)):
            self.attempted = True
            self.knew = _knew(turn.persona, produced, self.outcome == GIVEN, taught)
        if produced and self.outcome == MISSED:
            self.outcome, self.turn = PRODUCED, index

    @property
    def entry(self) -> LedgerEntry:
        return LedgerEntry(self.item.name, self.item.cue, self.outcome, self.turn, self.knew)


def read_ledger(items: Sequence[Item], turns: Sequence[Turn]) -> list[LedgerEntry]:
    """The ledger of a finished dialogue: one entry for each item, in the same order."""
    states = [_ItemState(item) for item in items]
    said: list[str] = []
    taught = False
    for index, turn in enumerate(turns):
        if turn.role == "student":
            text = visible_text(turn.text)
            for state in states:
                state.read_student(text, turn, index, taught)
            said.append(text)
        else:
            taught = True
            text = spoken(turn.text)
            for state in states:
                state.read_teacher(text, said, index)
    return [state.entry for state in states]


def _knew(persona: str | None, produced: bool, given: bool, taught: bool) -> bool | None:
    """Whether the student knew an item before the lesson, from the first message in which it says or attempts the item.

    A wrong first attempt shows that the student did not know it. A correct one shows that it did if nothing had been
    taught yet, or if the persona that makes no errors was drawn. If the teacher had already given the item, the text
    shows nothing, and a drawn error persona means that the student did not know it. In all other cases the answer is
    None, since a student that is told to make an error may make none.

    Args:
        persona: the persona that was drawn for the message.
        produced: whether the message contains the item.
        given: whether the teacher had given the item.
        taught: whether the teacher had written any message.
    """
    if not produced:
        return False
    if not taught or persona == CORRECT_PERSONA:
        return True
    return False if given and persona == ERROR_PERSONA else None
