"""The post-test on a problem: of the quickstart's lessons, of lesson plans, or of maths problems with siblings."""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from classroom_rl.config.base import EnvironmentConfig
from classroom_rl.environments.toy_language.grammar import (
    SUBJECTS,
    Question,
    answer,
    inject,
    kinds_for,
    parse_sentence,
)
from classroom_rl.environments.toy_language.lessons import Lesson
from classroom_rl.errors import DataError
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.feedback import gives_right_form, nearest_phrase
from classroom_rl.judges.messages import ParsedPlan, Phrase, answers, holds, read_plan, sentences
from classroom_rl.judges.post_test.ledger import read_ledger
from classroom_rl.judges.reference_answers import Reference, names_answer, read_reference
from classroom_rl.rollout.post_test import Exam, ExamQuestion, LedgerEntry
from classroom_rl.rollout.problem import Problem, SiblingProblem
from classroom_rl.rollout.text import UNSPACED, normal
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


class EmbeddedExaminer:
    """An examiner without a model.

    Args:
        siblings: the most sibling problems that are asked after a maths problem.
    """

    def __init__(self, siblings: int = 3):
        self._siblings = siblings

    def exam(self, problem: Problem) -> Exam:
        """The post-test on a problem.

        Raises:
            DataError: if it is no lesson of the quickstart, holds no phrases of a lesson plan, and is no maths problem
                with an answer and siblings.
        """
        plan = read_plan(problem.text)
        if plan.lesson is not None:
            return ToyExam(plan.lesson)
        if plan.phrases:
            return PhraseExam(plan, problem.text)
        if not problem.material.siblings or not problem.answer:
            lacks = "no answer" if problem.material.siblings else "no sibling problems"
            raise DataError(
                f"generation.post_test.enable is true, but the problem {problem.text[:80]!r} is no lesson plan and has "
                f"{lacks}: name the dataset's column with sibling_problems_column (python -m "
                "classroom_rl.judges.post_test.sibling_templates makes such data), or set "
                "generation.post_test.enable=false."
            )
        return MathsExam(problem, self._siblings)


def examiner_of(generation: EnvironmentConfig) -> EmbeddedExaminer | None:
    """The examiner of a configuration; None without a post-test."""
    post_test = getattr(generation, "post_test", None)  # of the classroom alone
    return EmbeddedExaminer(post_test.siblings) if post_test is not None and post_test.enable else None


def check_exams(generation: EnvironmentConfig, problems: Iterable[Problem]) -> None:
    """Raise a `DataError` for the first problem on which the configured post-test cannot be held."""
    examiner = examiner_of(generation)
    for problem in problems if examiner is not None else ():
        examiner.exam(problem)
