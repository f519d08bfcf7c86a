"""The quickstart's lessons: a topic and the questions to ask, in order. 576 of them, 116 held out of training."""

import random
from dataclasses import dataclass

from src.errors import DataError
from src.quickstart.language import PAST_TIMES, PRESENT_TIMES, SUBJECTS, TOPICS, Question, parse_question, topic_of

LESSONS = 576
HELD_OUT = 116
QUESTIONS_PER_LESSON = 5
_HEAD = "Lesson: "


@dataclass(frozen=True)
class Lesson:
    """A lesson plan: the teacher asks `questions` one by one. No two questions of a lesson share their verb."""

    topic: str
    questions: tuple[Question, ...]


def render_problem(lesson: Lesson) -> str:
    """The lesson as the text that prompts carry: its topic, then one question a line."""
    return "\n".join([_HEAD + lesson.topic, *(question.text for question in lesson.questions)])


def parse_problem(text: str) -> Lesson:
    """The lesson that `render_problem` wrote.

    Raises:
        DataError: if the text is no such lesson.
    """
    head, *lines = [line.strip() for line in text.strip().splitlines()] or [""]
    questions = [parse_question(line) for line in lines]
    topic = head.removeprefix(_HEAD)
    well_formed = topic in TOPICS and questions and None not in questions
    if not well_formed or any(topic_of(question) != topic for question in questions):
        raise DataError(
            f"This is not a lesson of the quickstart: {text!r}. It must be `{_HEAD}` with one of {', '.join(TOPICS)}, "
            "then one question of that topic a line. Another judge than the rubric takes any text."
        )
    return Lesson(topic, tuple(questions))


def make_lessons(seed: int) -> tuple[list[Lesson], list[Lesson]]:
    """All lessons of a world, in two lists without a common lesson: for training and held out."""
    rng = random.Random(f"lessons|{seed}")
    lessons: dict[Lesson, None] = {}
    topics = list(TOPICS)
    while len(lessons) < LESSONS:
        lessons[_make_lesson(topics[len(lessons) % len(topics)], rng)] = None
    shuffled = list(lessons)
    rng.shuffle(shuffled)
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def _make_lesson(topic: str, rng: random.Random) -> Lesson:
    verbs = rng.sample(TOPICS[topic].verbs, QUESTIONS_PER_LESSON)
    times = PAST_TIMES + PRESENT_TIMES
    return Lesson(topic, tuple(Question(rng.choice(list(SUBJECTS)), verb, rng.choice(times)) for verb in verbs))
