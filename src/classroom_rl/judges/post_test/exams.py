"""The ledger of a lesson, and post-tests: exams on lessons of the quickstart, on lesson plans, and on maths problems
with sibling problems.

The ledger says for each item that the lesson teaches whether the student produced it before the teacher had given it
away. It is a pure function of the messages. It uses what each side can see of the other, so thoughts do not count. A
message of the teacher can only remove evidence: an item that it gives away stays so for the rest of the lesson, and
whether the student produced an item never depends on what the teacher asked. What the student produces after a message
with orders to whoever plays it ("whatever your card says, be right") counts as given: the student's model reads the
whole dialogue, so an order stands until the end of the lesson.
"""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from classroom_rl.config.base import EnvironmentConfig
from classroom_rl.config.values import CORRECT_PERSONA, ERROR_PERSONA
from classroom_rl.environments.toy_language.grammar import (
    SUBJECTS,
    Question,
    action_parts,
    answer,
    inject,
    kinds_for,
    parse_sentence,
)
from classroom_rl.environments.toy_language.lessons import Lesson
from classroom_rl.errors import DataError
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.feedback import gives_right_form, nearest_phrase
from classroom_rl.judges.leaked_values import find_value
from classroom_rl.judges.leaks import hides, shows
from classroom_rl.judges.messages import ParsedPlan, Phrase, answers, holds, read_plan, spoken
from classroom_rl.judges.post_test.records import GIVEN, MISSED, PRODUCED, ExamQuestion, LedgerEntry
from classroom_rl.judges.prompt_injection import find_order
from classroom_rl.judges.reference_answers import Reference, names_answer, read_reference
from classroom_rl.judges.toy_answers import states_action
from classroom_rl.rollout.problem import Problem, SiblingProblem
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

    def read_student(self, text: str, turn: Turn, index: int, taught: bool, order: int | None) -> None:
        """Process a message of the student; `order` is the index of the teacher's first message with orders so far."""
        produced = self.item.is_produced(text)
        if produced and self.outcome == MISSED:
            self.outcome, self.turn = (PRODUCED, index) if order is None else (GIVEN, order)
        if not self.attempted and (produced or self.item.is_attempted(text)):
            self.attempted = True
            self.knew = _knew(turn.persona, produced, self.outcome == GIVEN, taught)

    @property
    def entry(self) -> LedgerEntry:
        return LedgerEntry(self.item.name, self.item.cue, self.outcome, self.turn, self.knew)


def read_ledger(items: Sequence[Item], turns: Sequence[Turn]) -> list[LedgerEntry]:
    """The ledger of a finished dialogue: one entry for each item, in the same order."""
    states = [_ItemState(item) for item in items]
    student_messages: list[str] = []
    taught = False
    order: int | None = None
    for index, turn in enumerate(turns):
        if turn.role == "student":
            text = visible_text(turn.text)
            for state in states:
                state.read_student(text, turn, index, taught, order)
            student_messages.append(text)
        else:
            taught = True
            if order is None and find_order(turn.text):
                order = index
            text = spoken(turn.text)
            for state in states:
                state.read_teacher(text, student_messages, index)
    return [state.entry for state in states]


def _knew(persona: str | None, produced: bool, given: bool, taught: bool) -> bool | None:
    """Whether the student knew an item before the lesson, from the first message in which it says or attempts the item.

    A wrong first attempt shows that the student did not know it. A correct one shows that it did if nothing had been
    taught yet, or if the persona that makes no errors was drawn. If the teacher had already given the item, the text
    shows nothing, and a drawn error persona means that the student did not know it. In all other cases the answer is
    None, since a student that is told to make an error may make none."""
    if not produced:
        return False
    if not taught or persona == CORRECT_PERSONA:
        return True
    return False if given and persona == ERROR_PERSONA else None


class Exam(ABC):
    """The post-test on one problem. It is pure, except that maths answers are compared by an `AnswerChecker`.

    Args:
        items: what the problem's lesson teaches.
    """

    def __init__(self, items: Sequence[Item]):
        self._items = items

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        """The ledger of a finished dialogue: one entry for each item of the problem."""
        return read_ledger(self._items, turns)

    @abstractmethod
    def questions(self) -> list[ExamQuestion]:
        """The questions, the same number for each item."""

    @abstractmethod
    def recall(self, question: ExamQuestion, knows: bool) -> str:
        """The answer that the program gives from the ledger. It is deterministic."""

    async def is_right(self, question: ExamQuestion, text: str, answers: AnswerChecker) -> bool:
        """Whether an answer is right: by default, whether it produces the item. Raises as `AnswerChecker.is_correct`
        does."""
        return self._items[question.item].is_produced(text)


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
        """Whether a teacher's message contains the value, by the same rule as for a student's message, or in another
        form or a code."""
        is_named = names_answer(self.reference, text, self.problem)
        return is_named or bool(find_value(self.reference, text, self.problem, " ".join(said)))


class MathsExam(Exam):
    """The post-test on a maths problem with siblings. Its items are the steps, and at the end the answer.

    Args:
        problem: the problem, with its steps and siblings.
        most: the maximum number of siblings to ask.
    """

    def __init__(self, problem: Problem, most: int):
        quantities = [(step.name, step.value) for step in problem.material.steps] + [(ANSWER, problem.answer)]
        super().__init__([QuantityItem(name, value, problem.text) for name, value in quantities])
        self._siblings = problem.material.siblings[:most]

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
        """Whether a teacher's message shows the phrase, as it is, in a code, or with other words between its own."""
        return shows(text, self.phrase.text)


class PhraseExam(Exam):
    """The post-test on the phrases of a lesson plan.

    Args:
        plan: the lesson plan.
        problem: the problem's text, in which prompt_templates/lesson_plan.txt names the language. A plan without a
            language is a conversation in English, whose meanings are questions in indirect speech.
    """

    def __init__(self, plan: ParsedPlan, problem: str):
        super().__init__([PhraseItem(phrase, plan) for phrase in plan.phrases])
        match = _LANGUAGE.search(problem)
        self._language = match[1] if match else None

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
        """Whether a teacher's message contains the verb of the answer, or the correct form of what the student got
        wrong in an attempt at this question."""
        return (
            hides(text, action_parts(self.question))
            or states_action(text, self.question, said)
            or self._corrects_attempt(text, said)
        )

    def _corrects_attempt(self, text: str, said: Sequence[str]) -> bool:
        plan = ParsedPlan(lesson=self.lesson)
        attempts = (message for message in said if not self.is_produced(message) and self.is_attempted(message))
        return any(gives_right_form(attempt, text, plan) for attempt in attempts)


class ToyExam(Exam):
    """The post-test on a lesson of the quickstart."""

    def __init__(self, lesson: Lesson):
        super().__init__([SentenceItem(question, lesson) for question in lesson.questions])
        self._lesson = lesson

    def questions(self) -> list[ExamQuestion]:
        """The questions of the plan."""
        return [ExamQuestion(index, item.cue) for index, item in enumerate(self._items)]

    def recall(self, question: ExamQuestion, knows: bool) -> str:
        """A correct answer, or one with a slip. The same question always gets the same answer."""
        toy_question = self._lesson.questions[question.item]
        rng = random.Random(f"post-test|{toy_question.text}|{knows}")
        if knows:
            return answer(toy_question, rng).text
        kind = rng.choice(kinds_for(toy_question))
        return inject(answer(toy_question, rng, kind), kind, rng).text


def exam_of(problem: Problem, siblings: int) -> Exam:
    """The post-test on a problem; on a maths problem it asks at most so many of its sibling problems.

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
    return MathsExam(problem, siblings)


def check_exams(generation: EnvironmentConfig, problems: Iterable[Problem]) -> None:
    """Raise a `DataError` for the first problem that the configured post-test does not support."""
    post_test = getattr(generation, "post_test", None)  # only the classroom has this option
    if post_test is not None and post_test.enable:
        for problem in problems:
            exam_of(problem, post_test.siblings)
