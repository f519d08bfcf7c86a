"""Post-tests: exams on lessons of the quickstart, on lesson plans, and on maths problems with sibling problems."""

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
"""The name of the item for the final answer."""


@dataclass(frozen=True)
class QuantityItem:
    """A quantity of a maths problem: the result of a step, or the answer. A student that names its value has produced
    it."""

    name: str
    value: str
    problem: str

    @property
    def cue(self) -> str:
        """The quantity's name."""
        return self.name

    @cached_property
    def reference(self) -> Reference:
        """The parsed value, for the search in messages."""
        return read_reference(self.value)

    def is_produced(self, text: str) -> bool:
        """Whether a student's message contains the value."""
        return names_answer(self.reference, text, self.problem)

    def is_attempted(self, text: str) -> bool:
        """Always False: no program can tell which quantity a wrong number is an attempt at."""
        return False

    def is_given(self, text: str, said: Sequence[str]) -> bool:
        """Whether a teacher's message contains the value, by the same rule as for a student's message."""
        return names_answer(self.reference, text, self.problem)


class MathsExam:
    """The post-test on a maths problem with siblings.

    Args:
        problem: the problem, with its steps and siblings.
        most: the maximum number of siblings to ask.
    """

    def __init__(self, problem: Problem, most: int):
        quantities = [(step.name, step.value) for step in problem.material.steps] + [(ANSWER, problem.answer)]
        self._items = [QuantityItem(name, value, problem.text) for name, value in quantities]
        self._siblings = problem.material.siblings[:most]

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        """One entry for each step of the problem, and one for its answer."""
        return read_ledger(self._items, turns)

    def questions(self) -> list[ExamQuestion]:
        """For each sibling, one question on each step, then one on the whole problem."""
        return [question for sibling in self._siblings for question in self._questions_on(sibling)]

    def _questions_on(self, sibling: SiblingProblem) -> list[ExamQuestion]:
        steps = [
            ExamQuestion(index, f"{sibling.problem}\n\nOf this problem, find this alone: {step.name}.", step.value)
            for index, step in enumerate(sibling.steps)
        ]
        return [*steps, ExamQuestion(len(self._items) - 1, sibling.problem, sibling.answer)]

    def recall(self, question: ExamQuestion, knows: bool) -> str:
        """The right answer in a box, or `DOES_NOT_KNOW`."""
        return rf"\boxed{{{question.reference}}}" if knows else DOES_NOT_KNOW

    async def is_right(self, question: ExamQuestion, text: str, answers: AnswerChecker) -> bool:
        """Whether the boxed answer equals the sibling's."""
        return await answers.is_correct(text, question.reference)


DOES_NOT_KNOW = "I do not know."
"""The answer of the student that is simulated from the ledger to a question about an item that it does not know."""

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
        """Whether a student's message contains the phrase, ignoring case and punctuation."""
        return holds(text, self.phrase.text)

    def is_attempted(self, text: str) -> bool:
        """Whether the message is an attempt at a phrase of the plan and resembles this one most."""
        return nearest_phrase(text, self.plan) == self.phrase.text

    def is_given(self, text: str, said: Sequence[str]) -> bool:
        """Whether a teacher's message contains the words of the phrase in order, possibly with other words in between;
        in scripts without spaces, the phrase itself."""
        if holds(text, self.phrase.text):
            return True
        if UNSPACED.search(self.phrase.text):
            return False
        message_words = iter(normal(text).split())
        words = normal(self.phrase.text).split()
        # `in` consumes the iterator up to the match, so this checks for a subsequence.
        return bool(words) and all(word in message_words for word in words)


class PhraseExam:
    """The post-test on the phrases of a lesson plan.

    Args:
        plan: the lesson plan.
        problem: the problem's text, in which prompt_templates/lesson_plan.txt names the language. A plan without a
            language is a conversation in English, whose meanings are questions in indirect speech.
    """

    def __init__(self, plan: ParsedPlan, problem: str):
        self._items = [PhraseItem(phrase, plan) for phrase in plan.phrases]
        match = _LANGUAGE.search(problem)
        self._language = match[1] if match else None

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        """One entry for each phrase."""
        return read_ledger(self._items, turns)

    def questions(self) -> list[ExamQuestion]:
        """For each phrase, how to say its meaning; without a language, the question that the phrase answers."""
        return [ExamQuestion(index, self._ask(item.cue)) for index, item in enumerate(self._items)]

    def _ask(self, meaning: str) -> str:
        if self._language is None:
            return f"Tell me, {meaning}?"
        return f'How do you say this in {self._language}: "{meaning}"? Answer with the phrase alone.'

    def recall(self, question: ExamQuestion, knows: bool) -> str:
        """The phrase, or `DOES_NOT_KNOW`."""
        return self._items[question.item].name if knows else DOES_NOT_KNOW

    async def is_right(self, question: ExamQuestion, text: str, answers: AnswerChecker) -> bool:
        """Whether an answer contains the phrase."""
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
        """The correct form of the verb, such as "cooked"."""
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
        """Whether a teacher's message contains the subject and the verb of the answer, the form of the verb if the
        question does not contain it, or the correct form of what the student got wrong in an attempt at this
        question."""
        return self._says_form(text, said) or self._says_subject_and_verb(text) or self._corrects_attempt(text, said)

    def _says_form(self, text: str, said: Sequence[str]) -> bool:
        """Whether the message contains the form of the verb. A form that the student has already said does not count,
        since hints at a slip repeat it."""
        if self.form == self.question.verb or any(self.form in normal(message).split() for message in said):
            return False
        return self.form in normal(text).split()

    def _says_subject_and_verb(self, text: str) -> bool:
        """Whether the message contains the subject with the verb, in the person of the answer ("I cook") or of the
        question ("you cook"). The latter gives nothing away in a question such as "What do you cook every day?", or in
        "tell me what you cook"."""
        subjects = (SUBJECTS[self.question.subject], self.question.subject)
        in_answer, in_question = (f"{normal(subject)} {self.form}" for subject in subjects)
        remaining = normal(text)
        if self.form == self.question.verb:
            statements = (sentence for sentence in sentences(text) if not sentence.rstrip('"”» ').endswith("?"))
            remaining = normal(" ".join(statements)).replace(f"what {in_question}", "")
        return f" {in_answer} " in f" {normal(text)} " or f" {in_question} " in f" {remaining} "

    def _corrects_attempt(self, text: str, said: Sequence[str]) -> bool:
        plan = ParsedPlan(lesson=self.lesson)
        attempts = (message for message in said if not self.is_produced(message) and self.is_attempted(message))
        return any(gives_right_form(attempt, text, plan) for attempt in attempts)


class ToyExam:
    """The post-test on a lesson of the quickstart."""

    def __init__(self, lesson: Lesson):
        self._items = [SentenceItem(question, lesson) for question in lesson.questions]

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        """One entry for each question of the plan."""
        return read_ledger(self._items, turns)

    def questions(self) -> list[ExamQuestion]:
        """The questions of the plan."""
        return [ExamQuestion(index, item.cue) for index, item in enumerate(self._items)]

    def recall(self, question: ExamQuestion, knows: bool) -> str:
        """A correct answer, or one with a slip. The same question always gets the same answer."""
        toy_question = self._items[question.item].question
        rng = random.Random(f"post-test|{toy_question.text}|{knows}")
        if knows:
            return answer(toy_question, rng).text
        kind = rng.choice(kinds_for(toy_question))
        return inject(answer(toy_question, rng, kind), kind, rng).text

    async def is_right(self, question: ExamQuestion, text: str, answers: AnswerChecker) -> bool:
        """Whether an answer is a sentence that answers the question, without a slip."""
        return self._items[question.item].is_produced(text)


class EmbeddedExaminer:
    """An examiner without a model.

    Args:
        siblings: the maximum number of sibling problems to ask after a maths problem.
    """

    def __init__(self, siblings: int = 3):
        self._siblings = siblings

    def exam(self, problem: Problem) -> Exam:
        """The post-test on a problem.

        Raises:
            DataError: if the problem is neither a lesson of the quickstart, nor a lesson plan with phrases, nor a maths
                problem with an answer and siblings.
        """
        plan = read_plan(problem.text)
        if plan.lesson is not None:
            return ToyExam(plan.lesson)
        if plan.phrases:
            return PhraseExam(plan, problem.text)
        if not problem.material.siblings or not problem.answer:
            missing = "no answer" if problem.material.siblings else "no sibling problems"
            raise DataError(
                f"generation.post_test.enable is true, but the problem {problem.text[:80]!r} is no lesson plan and has "
                f"{missing}: name the dataset's column with sibling_problems_column (python -m "
                "classroom_rl.judges.post_test.sibling_templates makes such data), or set "
                "generation.post_test.enable=false."
            )
        return MathsExam(problem, self._siblings)


def examiner_of(generation: EnvironmentConfig) -> EmbeddedExaminer | None:
    """The examiner for a configuration; None if it has no post-test."""
    post_test = getattr(generation, "post_test", None)  # only the classroom has this option
    return EmbeddedExaminer(post_test.siblings) if post_test is not None and post_test.enable else None


def check_exams(generation: EnvironmentConfig, problems: Iterable[Problem]) -> None:
    """Raise a `DataError` for the first problem that the configured post-test does not support."""
    examiner = examiner_of(generation)
    for problem in problems if examiner is not None else ():
        examiner.exam(problem)
