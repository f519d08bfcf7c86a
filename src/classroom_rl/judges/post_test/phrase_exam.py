"""The post-test on a lesson plan: its phrases, from memory."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.feedback import nearest_phrase
from classroom_rl.judges.messages import holds
from classroom_rl.judges.plans import ParsedPlan, Phrase
from classroom_rl.judges.post_test.ledger import read_ledger
from classroom_rl.rollout.post_test import ExamQuestion, LedgerEntry
from classroom_rl.rollout.text import UNSPACED, normal
from classroom_rl.rollout.tokens import Turn

DOES_NOT_KNOW = "I do not know."
"""What the student that the program holds answers where it knows nothing."""

_LANGUAGE = re.compile(r"^Language: (\S.*)$", re.MULTILINE)


@dataclass(frozen=True)
class PhraseItem:
    """A phrase of the plan. The student knows it if it can say it word for word."""

    phrase: Phrase
    plan: ParsedPlan

    @property
    def name(self) -> str:
        """The phrase."""
        return self.phrase.text

    @property
    def cue(self) -> str:
        """The phrase's meaning in English."""
        return self.phrase.meaning

    def is_produced(self, text: str) -> bool:
        """Whether a student's message holds the phrase, whatever its case and punctuation."""
        return holds(text, self.phrase.text)

    def is_attempted(self, text: str) -> bool:
        """Whether a student's message resembles this phrase more than any other of the plan."""
        return nearest_phrase(text, self.plan) == self.phrase.text

    def is_given(self, text: str, said: Sequence[str]) -> bool:
        """Whether a teacher's message holds the words of the phrase in their order, also with others between them; in
        scripts without spaces, the phrase itself."""
        if holds(text, self.phrase.text):
            return True
        if UNSPACED.search(self.phrase.text):
            return False
        heard = iter(normal(text).split())
        words = normal(self.phrase.text).split()
        return bool(words) and all(word in heard for word in words)


class PhraseExam:
    """The post-test on the phrases of a lesson plan.

    Args:
        problem: the problem's text, in which prompt_templates/lesson_plan.txt writes the language. A plan without one
            is a talk in English, whose meanings are questions in indirect speech.
    """

    def __init__(self, plan: ParsedPlan, problem: str):
        self._items = [PhraseItem(phrase, plan) for phrase in plan.phrases]
        found = _LANGUAGE.search(problem)
        self._language = found[1] if found else None

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        """One entry for each phrase."""
        return read_ledger(self._items, turns)

    def questions(self) -> list[ExamQuestion]:
        """For each phrase, how to say what it means; in a talk, the question that it answers."""
        return [ExamQuestion(place, self._ask(item.cue)) for place, item in enumerate(self._items)]

    def _ask(self, meaning: str) -> str:
        if self._language is None:
            return f"Tell me, {meaning}?"
        return f'How do you say this in {self._language}: "{meaning}"? Answer with the phrase alone.'

    def recall(self, question: ExamQuestion, knows: bool) -> str:
        """The phrase, or `DOES_NOT_KNOW`."""
        return self._items[question.item].name if knows else DOES_NOT_KNOW

    async def is_right(self, question: ExamQuestion, text: str, answers: AnswerChecker) -> bool:
        """Whether an answer holds the phrase."""
        return self._items[question.item].is_produced(text)
