"""Reads a lesson plan back from a problem's text: the phrases to produce, or the questions to answer."""

import re
from dataclasses import dataclass
from functools import lru_cache

from classroom_rl.environments.toy_language.grammar import SUBJECTS, find_slips, parse_question, parse_sentence
from classroom_rl.environments.toy_language.lessons import Lesson, parse_problem
from classroom_rl.errors import DataError

_CHUNK = re.compile(r"^\d+\. (?P<phrase>.+?) \| meaning: (?P<meaning>.+?) \| use: ", re.MULTILINE)


@dataclass(frozen=True)
class Phrase:
    """A phrase of a lesson plan that the student should learn to say, and its meaning in English."""

    text: str
    meaning: str


@dataclass(frozen=True)
class ParsedPlan:
    """A parsed lesson plan: its `phrases`, if prompt_templates/lesson_plan.txt rendered the problem, or the `lesson` of
    the quickstart. Any other text has neither; figures that need a plan are not measured on it."""

    phrases: tuple[Phrase, ...] = ()
    lesson: Lesson | None = None

    @property
    def items(self) -> int:
        """The number of phrases or questions that should be introduced and produced."""
        return len(self.lesson.questions) if self.lesson else len(self.phrases)

    def find_error(self, text: str) -> bool | None:
        """Whether a student's text holds an error. None in lessons other than the quickstart's: rules cannot tell."""
        return bool(find_slips(text)) if self.lesson else None


@lru_cache(maxsize=4096)
def read_plan(problem: str) -> ParsedPlan:
    """The plan in a problem's text."""
    try:
        return ParsedPlan(lesson=parse_problem(problem))
    except DataError:
        return ParsedPlan(tuple(Phrase(found["phrase"], found["meaning"]) for found in _CHUNK.finditer(problem)))


def questions_asked(text: str) -> set[str]:
    """The questions of the quickstart's language in a teacher's message, spelt as in `Question.text`."""
    asked = (parse_question(part) for part in re.findall(r"[^.?!]*\?", text))
    return {question.text for question in asked if question is not None}


def answers(text: str, lesson: Lesson) -> set[str]:
    """The questions of the lesson that a student's sentence answers; none if the sentence holds a slip."""
    sentence = parse_sentence(text)
    if sentence is None or find_slips(text):
        return set()
    return {
        question.text
        for question in lesson.questions
        if SUBJECTS[question.subject] == sentence.subject
        and question.time.lower() == sentence.time.lower()
        and sentence.verb.startswith(question.verb)
    }
