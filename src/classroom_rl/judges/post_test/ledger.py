"""The ledger of a lesson: for each item, whether the student produced it before the teacher had said it.

A pure function of the messages. It reads what each side can see of the other, so thoughts do not count. A message of
the teacher can only take evidence away: what it gives is given for the rest of the lesson, and whether the student
produced an item never depends on what the teacher asked.
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
    """One thing that a lesson teaches. `name` and `cue` are as in `LedgerEntry`."""

    name: str
    cue: str

    def is_produced(self, text: str) -> bool:
        """Whether a student's message holds the item."""

    def is_attempted(self, text: str) -> bool:
        """Whether a student's message is a try at the item; asked only if it does not hold it."""

    def is_given(self, text: str, said: Sequence[str]) -> bool:
        """Whether a teacher's message gives the item away to a student that has said `said` so far."""


@dataclass
class _Account:
    """The entry of one item while the messages are read. `met` is whether the student has said or tried it."""

    item: Item
    outcome: str = MISSED
    turn: int | None = None
    knew: bool | None = None
    met: bool = False

    def read_teacher(self, text: str, said: Sequence[str], place: int) -> None:
        if self.outcome == MISSED and self.item.is_given(text, said):
            self.outcome, self.turn = GIVEN, place

    def read_student(self, text: str, turn: Turn, place: int, taught: bool) -> None:
        produced = self.item.is_produced(text)
        if not self.met and (produced or self.item.is_attempted(text)):
            self.met = True
            self.knew = _knew(turn.persona, produced, self.outcome == GIVEN, taught)
        if produced and self.outcome == MISSED:
            self.outcome, self.turn = PRODUCED, place

    @property
    def entry(self) -> LedgerEntry:
        return LedgerEntry(self.item.name, self.item.cue, self.outcome, self.turn, self.knew)


def read_ledger(items: Sequence[Item], turns: Sequence[Turn]) -> list[LedgerEntry]:
    """The ledger of a finished dialogue, one entry for each item, in their order."""
    accounts = [_Account(item) for item in items]
    said: list[str] = []
    taught = False
    for place, turn in enumerate(turns):
        if turn.role == "student":
            text = visible_text(turn.text)
            for account in accounts:
                account.read_student(text, turn, place, taught)
            said.append(text)
        else:
            taught = True
            text = spoken(turn.text)
            for account in accounts:
                account.read_teacher(text, said, place)
    return [account.entry for account in accounts]


def _knew(persona: str | None, produced: bool, given: bool, taught: bool) -> bool | None:
    """Whether the student knew an item before the lesson, from the first message in which it says or tries it.

    A wrong first try shows that it did not. A right one shows that it did if nothing had been taught yet, or if the
    persona was drawn that makes no error. If the teacher had said the item already, the text shows nothing, and the
    persona that was drawn decides. In every other case the program cannot tell: a student told to make an error may
    make none.
    """
    if not produced:
        return False
    if not taught or persona == CORRECT_PERSONA:
        return True
    return False if given and persona == ERROR_PERSONA else None
