"""The quickstart's 576 lessons, 116 of them held out of training. A lesson is a topic and a list of questions."""

import random
import re
from dataclasses import dataclass

from classroom_rl.environments.toy_language.grammar import PAST_TIMES, PRESENT_TIMES, SUBJECTS, TOPICS, Question
from classroom_rl.errors import DataError

LESSONS = 576
HELD_OUT = 116
_SUBJECT_BY_SHORT_NAME = {subject.removeprefix("your "): subject for subject in SUBJECTS}
_PROBLEM = re.compile(r"Lesson: (\w+), (\w+), (\w+(?: \w+)?)\nPlan: (\w+(?:, \w+)*)")


@dataclass(frozen=True)
class Lesson:
    """A lesson: the teacher asks what several people do or did, one after the other, always with the same verb.

    Attributes:
        topic: a key of `TOPICS`.
        verb: one of its verbs.
        time: one of `PAST_TIMES` or `PRESENT_TIMES`; the same in all questions.
        subjects: keys of `SUBJECTS`, in the order in which to ask about them.
    """

    topic: str
    verb: str
    time: str
    subjects: tuple[str, ...]

    @property
    def questions(self) -> tuple[Question, ...]:
        """The questions that the teacher should ask, in order."""
        return tuple(Question(subject, self.verb, self.time) for subject in self.subjects)


def render_problem(lesson: Lesson) -> str:
    """The lesson as the problem text in prompts: topic, verb and time, then the people in order."""
    plan = ", ".join(subject.removeprefix("your ") for subject in lesson.subjects)
    return f"Lesson: {lesson.topic}, {lesson.verb}, {lesson.time}\nPlan: {plan}"


def parse_problem(text: str) -> Lesson:
    """The lesson in a text written by `render_problem`.

    Raises:
        DataError: if the text is not a lesson of the quickstart.
    """
    match = _PROBLEM.fullmatch(text.strip())
    if match is not None:
        topic, verb, time, plan = match.groups()
        subjects = tuple(_SUBJECT_BY_SHORT_NAME.get(name, name) for name in plan.split(", "))
        if _is_known(Lesson(topic, verb, time, subjects)):
            return Lesson(topic, verb, time, subjects)
    raise DataError(
        f"This is not a lesson of the quickstart: {text!r}. The rubric judges those only; "
        "for other problems set judge_model to a model that can read them."
    )


def _is_known(lesson: Lesson) -> bool:
    known_verb = lesson.topic in TOPICS and lesson.verb in TOPICS[lesson.topic].verbs
    known_time = lesson.time in PAST_TIMES + PRESENT_TIMES
    distinct = len(set(lesson.subjects)) == len(lesson.subjects)
    return known_verb and known_time and distinct and set(lesson.subjects) <= set(SUBJECTS)


def make_lessons(seed: int) -> tuple[list[Lesson], list[Lesson]]:
    """All lessons of a world, as two disjoint lists: training lessons and held-out lessons."""
    rng = random.Random(f"lessons|{seed}")
    lessons: dict[Lesson, None] = {}  # a dict as an ordered set: equal lessons count once, and the order is fixed
    topics = list(TOPICS)
    while len(lessons) < LESSONS:
        lessons[_make_lesson(topics[len(lessons) % len(topics)], rng)] = None
    shuffled = list(lessons)
    rng.shuffle(shuffled)
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def _make_lesson(topic: str, rng: random.Random) -> Lesson:
    """A random lesson. Its subjects are those of `SUBJECTS` in order, starting at a random one and wrapping around."""
    subjects, start = tuple(SUBJECTS), rng.randrange(len(SUBJECTS))
    time = rng.choice(PAST_TIMES + PRESENT_TIMES)
    return Lesson(topic, rng.choice(TOPICS[topic].verbs), time, subjects[start:] + subjects[:start])
