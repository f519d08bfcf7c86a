"""The post-test on a maths problem: its sibling problems, which have the same structure and other numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.post_test.ledger import read_ledger
from classroom_rl.judges.post_test.phrase_exam import DOES_NOT_KNOW
from classroom_rl.judges.reference_answers import Reference, names_answer, read_reference
from classroom_rl.rollout.post_test import ExamQuestion, LedgerEntry
from classroom_rl.rollout.problem import Problem, SiblingProblem
from classroom_rl.rollout.tokens import Turn

ANSWER = "the answer of the problem"
"""The name of the item that is the final answer."""


@dataclass(frozen=True)
class QuantityItem:
    """A quantity: a step of the problem or its answer. The student knows how to get it if it has named its value."""

    name: str
    value: str
    problem: str

    @property
    def cue(self) -> str:
        """The quantity's name."""
        return self.name

    @cached_property
    def reference(self) -> Reference:
        """The value, as it is searched for in messages."""
        return read_reference(self.value)

    def is_produced(self, text: str) -> bool:
        """Whether a student's message names the value."""
        return names_answer(self.reference, text, self.problem)

    def is_attempted(self, text: str) -> bool:
        """False: which quantity a wrong number was to be, no program can tell."""
        return False

    def is_given(self, text: str, said: Sequence[str]) -> bool:
        """Whether a teacher's message names the value, by the same rule as a student's."""
        return names_answer(self.reference, text, self.problem)


class MathsExam:
    """The post-test on a maths problem with siblings.

    Args:
        most: the most siblings that are asked.
    """

    def __init__(self, problem: Problem, most: int):
        named = [(step.name, step.value) for step in problem.material.steps] + [(ANSWER, problem.answer)]
        self._items = [QuantityItem(name, value, problem.text) for name, value in named]
        self._siblings = problem.material.siblings[:most]

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        """One entry for each step of the problem, and one for its answer."""
        return read_ledger(self._items, turns)

    def questions(self) -> list[ExamQuestion]:
        """For each sibling, its steps one by one, then the whole problem."""
        return [question for sibling in self._siblings for question in self._questions_on(sibling)]

    def _questions_on(self, sibling: SiblingProblem) -> list[ExamQuestion]:
        steps = [
            ExamQuestion(place, f"{sibling.problem}\n\nOf this problem, find this alone: {step.name}.", step.value)
            for place, step in enumerate(sibling.steps)
        ]
        return [*steps, ExamQuestion(len(self._items) - 1, sibling.problem, sibling.answer)]

    def recall(self, question: ExamQuestion, knows: bool) -> str:
        """The right answer in a box, or `DOES_NOT_KNOW`."""
        return rf"\boxed{{{question.reference}}}" if knows else DOES_NOT_KNOW

    async def is_right(self, question: ExamQuestion, text: str, answers: AnswerChecker) -> bool:
        """Whether the boxed answer equals the sibling's."""
        return await answers.is_correct(text, question.reference)
