"""What a lesson is to bring about, read from the text of its problem: phrases to produce, or questions to answer."""

import re
from dataclasses import dataclass
from functools import lru_cache

from src.errors import DataError
from src.toy_language.grammar import SUBJECTS, find_slips, parse_question, parse_sentence
from src.toy_language.lessons import Lesson, parse_problem

_CHUNK = re.compile(r"^\d+\. (?P<phrase>.+?) \| meaning: (?P<meaning>.+?) \| use: ", re.MULTILINE)


@dataclass(frozen=True)
class Phrase:
    """A chunk of a lesson plan: what the student should be able to say, and what it means in English."""

    text: str
    meaning: str


@dataclass(frozen=True)
class Plan:
    """A lesson's plan: `phrases` of a lesson plan as prompt_templates/lesson_plan.txt writes them, or the `lesson` of
    the quickstart; a text of another kind has neither, and what needs a plan is not measured on it."""

    phrases: tuple[Phrase, ...] = ()
    lesson: Lesson | None = None

    @property
    def items(self) -> int:
        """How many things the plan wants to be introduced and produced."""
        return len(self.lesson.questions) if self.lesson else len(self.phrases)

    def find_error(self, text: str) -> bool | None:
        """Whether a student's text holds an error; None where rules cannot tell, that is in every open language."""
        return bool(find_slips(text)) if self.lesson else None


@lru_cache(maxsize=4096)
def read_plan(problem: str) -> Plan:
    """The plan in the text of a problem."""
    try:
        return Plan(lesson=parse_problem(problem))
    except DataError:
        return Plan(tuple(Phrase(found["phrase"], found["meaning"]) for found in _CHUNK.finditer(problem)))


def questions_asked(text: str) -> set[str]:
    """The questions of the quickstart's language in a teacher's message, as the plan writes them."""
    asked = (parse_question(part) for part in re.findall(r"[^.?!]*\?", text))
    return {question.text for question in asked if question is not None}


def answers(text: str, lesson: Lesson) -> set[str]:
    """The questions of the lesson that a student's right sentence answers."""
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
