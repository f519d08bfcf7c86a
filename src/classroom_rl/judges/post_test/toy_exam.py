"""The post-test on a lesson of the quickstart: the questions of its plan, in the words of its grammar."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from classroom_rl.environments.toy_language.grammar import (
    SUBJECTS,
    Question,
    answer,
    inject,
    kinds_for,
    parse_sentence,
)
from classroom_rl.environments.toy_language.lessons import Lesson
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.feedback import gives_right_form
from classroom_rl.judges.messages import sentences
from classroom_rl.judges.plans import ParsedPlan, answers
from classroom_rl.judges.post_test.ledger import read_ledger
from classroom_rl.rollout.post_test import ExamQuestion, LedgerEntry
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.tokens import Turn


@dataclass(frozen=True)
class SentenceItem:
    """A question of the plan. The student knows it if it can say a sentence that answers it, without a slip."""

    question: Question
    lesson: Lesson

    @property
    def name(self) -> str:
        """The question."""
        return self.question.text

    @property
    def cue(self) -> str:
        """The question."""
        return self.question.text

    @cached_property
    def form(self) -> str:
        """The right form of the verb: "cooked"."""
        return answer(self.question, random.Random(0)).verb

    def is_produced(self, text: str) -> bool:
        """Whether a student's message is a sentence that answers the question, without a slip."""
        return self.question.text in answers(text, self.lesson)

    def is_attempted(self, text: str) -> bool:
        """Whether a student's message is a sentence with the subject and the verb of the answer."""
        sentence = parse_sentence(text)
        if sentence is None or sentence.subject != SUBJECTS[self.question.subject]:
            return False
        return sentence.verb.startswith(self.question.verb)

    def is_given(self, text: str, said: Sequence[str]) -> bool:
        """Whether a teacher's message says the answer's subject with its verb, the verb's form where the question does
        not hold it, or the right form of what the student got wrong in a try at this question."""
        return self._says_form(text, said) or self._says_subject_and_verb(text) or self._mends_a_try(text, said)

    def _says_form(self, text: str, said: Sequence[str]) -> bool:
        """What the student itself has said before may be repeated, as a hint at a slip does."""
        if self.form == self.question.verb or any(self.form in normal(each).split() for each in said):
            return False
        return self.form in normal(text).split()

    def _says_subject_and_verb(self, text: str) -> bool:
        """ "What do you cook every day?" holds "you cook" and gives nothing away; so does "tell me what you cook"."""
        own, asked = (f"{normal(who)} {self.form}" for who in (SUBJECTS[self.question.subject], self.question.subject))
        plain = normal(text)
        if self.form == self.question.verb:
            statements = (each for each in sentences(text) if not each.rstrip('"”» ').endswith("?"))
            plain = normal(" ".join(statements)).replace(f"what {asked}", "")
        return f" {own} " in f" {normal(text)} " or f" {asked} " in f" {plain} "

    def _mends_a_try(self, text: str, said: Sequence[str]) -> bool:
        plan = ParsedPlan(lesson=self.lesson)
        tries = (each for each in said if not self.is_produced(each) and self.is_attempted(each))
        return any(gives_right_form(each, text, plan) for each in tries)


class ToyExam:
    """The post-test on a lesson of the quickstart."""

    def __init__(self, lesson: Lesson):
        self._items = [SentenceItem(question, lesson) for question in lesson.questions]

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        """One entry for each question of the plan."""
        return read_ledger(self._items, turns)

    def questions(self) -> list[ExamQuestion]:
        """The questions of the plan."""
        return [ExamQuestion(place, item.cue) for place, item in enumerate(self._items)]

    def recall(self, question: ExamQuestion, knows: bool) -> str:
        """A right answer, or one with a slip."""
        asked = self._items[question.item].question
        rng = random.Random(f"post-test|{asked.text}|{knows}")
        if knows:
            return answer(asked, rng).text
        kind = rng.choice(kinds_for(asked))
        return inject(answer(asked, rng, kind), kind, rng).text

    async def is_right(self, question: ExamQuestion, text: str, answers: AnswerChecker) -> bool:
        """Whether an answer is a sentence that answers the question, without a slip."""
        return self._items[question.item].is_produced(text)
