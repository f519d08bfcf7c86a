"""The post-test of a dialogue: a ledger of what the student has learned, the questions, and the student's answers.

An environment gets the `Exam` on a problem from an `Examiner`. An exam is pure, except that maths answers are compared
by an `AnswerChecker`. docs/trusting_rewards.md says what the ledger counts as evidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Optional, Protocol

from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.tokens import Turn

if TYPE_CHECKING:
    from classroom_rl.grading.checker import AnswerChecker

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


class Exam(Protocol):
    """The post-test on one problem."""

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        """The ledger of a finished dialogue: one entry for each item of the problem."""

    def questions(self) -> list[ExamQuestion]:
        """The questions, the same number for each item."""

    def recall(self, question: ExamQuestion, knows: bool) -> str:
        """The answer that the program gives from the ledger. It is deterministic."""

    async def is_right(self, question: ExamQuestion, text: str, answers: "AnswerChecker") -> bool:
        """Whether an answer is right; raises as `AnswerChecker.is_correct` does."""


class Examiner(Protocol):
    """Knows the post-test on every problem of a configuration."""

    def exam(self, problem: Problem) -> Exam:
        """The post-test on a problem.

        Raises:
            DataError: if there is no post-test for such a problem.
        """
