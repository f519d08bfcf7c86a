"""The post-test of a dialogue: a ledger of what the student has learned, the questions, and the student's answers.

docs/trusting_rewards.md says what the ledger counts as evidence.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Optional

PRODUCED, GIVEN, MISSED = OUTCOMES = ("produced", "given", "missed")
"""The outcome of an item in a lesson: the student produced it by itself, the teacher said it first (or ordered whoever
plays the student to be right), or neither."""


@dataclass(frozen=True)
class LedgerEntry:
    """The ledger's entry for one item of a lesson: a phrase, a question of the plan, a quantity.

    Attributes:
        item: the item itself, as it is told to a student that knows it.
        cue: what the student is asked for; it does not give the item away.
        outcome: one of `OUTCOMES`.
        turn: the index of the message that is the evidence, or that gave the item away; None if it was missed.
        knew: whether the student knew it before the lesson, as far as the program can tell; None if it cannot.
    """

    item: str
    cue: str
    outcome: str
    turn: Optional[int] = None
    knew: Optional[bool] = None

    @property
    def known(self) -> bool:
        """Whether the lesson holds evidence that the student knows the item."""
        return self.outcome == PRODUCED


@dataclass(frozen=True)
class ExamQuestion:
    """A question of a post-test: the index of its item in the ledger, its text, and for maths the right answer."""

    item: int
    text: str
    reference: str = ""


@dataclass(frozen=True)
class ExamAnswer:
    """An answer to a question of a post-test. `student` is `ledger` if the program answered from the ledger, `student`
    if the student's model answered; `item` is the index of the question's item in the ledger."""

    student: str
    item: int
    question: str
    text: str
    right: bool


@dataclass(frozen=True)
class PostTest:
    """The ledger of a conversation, and the answers to its post-test."""

    ledger: tuple[LedgerEntry, ...]
    answers: tuple[ExamAnswer, ...]

    def score(self, student: str) -> Optional[float]:
        """The share of right answers among those of `student`, in [0, 1]; None if it was not asked.

        For `ledger` it is the share of items with evidence, since there are equally many questions on each item.
        """
        grades = [answer.right for answer in self.answers if answer.student == student]
        return fmean(grades) if grades else None
