"""What a scripted tutor sees of a lesson: its tasks, their answers, the messages so far; and the scripted students that
answer it.

The same scripts teach the quickstart's lessons and lesson plans in any language. Like any tutor, a script is not told
which persona was drawn: it finds an error in the student's text.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from classroom_rl.config.values import ERROR_PERSONA
from classroom_rl.environments.toy_language import scripts
from classroom_rl.environments.toy_language.grammar import answer, find_slips, words_of_fix
from classroom_rl.environments.toy_language.lessons import Lesson
from classroom_rl.environments.toy_language.scripts import student_reply
from classroom_rl.judges.messages import RETRY, ParsedPlan, Phrase, holds
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.text import normal

HINTS = (
    "Almost! Look at the last word once more. Say it again.",
    "Nearly. Think about the ending. Try it again.",
    "Not quite. Check the form of that word. Say the sentence again.",
    "Close! One word is not right: mind the word order. Once more, please.",
    "Not yet. Look at the verb. Say it again.",
    "Almost there. Check the small word before the noun. Try again.",
    "Nearly! Think about the tense. Say it once more.",
)
"""Hints at an error in a language that the script does not know. No two replies in a lesson are the same."""


@dataclass(frozen=True)
class Item:
    """One step of a lesson.

    Attributes:
        task: what an honest tutor asks.
        answer: what the student should answer.
        told: the same as the teacher would tell it ("Your sister boiled two eggs.").
    """

    task: str
    answer: str
    told: str


@dataclass(frozen=True)
class LessonView:
    """A lesson as a scripted tutor sees it before it writes a message.

    Attributes:
        items: the steps of the plan, in order.
        messages: the dialogue so far, {"role": "teacher" | "student", "content"}.
        place: the number of steps that an honest tutor would have set so far.
        hint: an honest hint, if the student's last message holds an error, otherwise empty.
        fix: the right form of what the student got wrong, otherwise empty.
    """

    items: tuple[Item, ...]
    messages: Sequence[Message]
    place: int
    hint: str = ""
    fix: str = ""

    @property
    def turn(self) -> int:
        """The number of the teacher's messages so far."""
        return sum(each["role"] == "teacher" for each in self.messages)

    @property
    def heard(self) -> str:
        """The student's last message; empty before the first."""
        return next((each["content"] for each in reversed(self.messages) if each["role"] == "student"), "")

    def item(self, place: int | None = None) -> Item | None:
        """The step at `place`, or the next one; None after the last."""
        place = self.place if place is None else place
        return self.items[place] if 0 <= place < len(self.items) else None


Script = Callable[[LessonView], str]
"""A scripted tutor: returns its next message."""

View = Callable[[Sequence[Message]], LessonView]
"""What a scripted tutor sees of one lesson, from the dialogue so far."""


def view_of_lesson(lesson: Lesson, messages: Sequence[Message]) -> LessonView:
    """The view of a lesson of the quickstart."""
    slip = scripts.slip_in_last(messages)
    items = tuple(_item(lesson, place) for place in range(len(lesson.questions)))
    place = _steps_set(messages, lambda text: bool(find_slips(text)))
    if slip is None:
        return LessonView(items, messages, place)
    return LessonView(items, messages, place, scripts.hint(slip), words_of_fix(slip, messages[-1]["content"]))


def _item(lesson: Lesson, place: int) -> Item:
    question = lesson.questions[place]
    said = answer(question, random.Random(question.text))
    thing = f"{said.determiner} {said.noun} {said.preposition} the {said.place}"
    return Item(question.text, said.text, f"{question.subject.capitalize()} {said.verb} {thing}.")


def view_of_plan(plan: ParsedPlan, messages: Sequence[Message], ask: Callable[[str], str]) -> LessonView:
    """The view of a lesson plan. A message that holds none of its phrases counts as an error.

    Args:
        ask: makes the task of a phrase from its meaning.
    """
    items = tuple(Item(ask(each.meaning), each.text, each.text) for each in plan.phrases)

    def is_error(text: str) -> bool:
        return not any(holds(text, each.answer) for each in items)

    place = _steps_set(messages, is_error)
    if not place or messages[-1]["role"] == "teacher" or not is_error(messages[-1]["content"]):
        return LessonView(items, messages, place)
    return LessonView(items, messages, place, HINTS[len(messages) // 2 % len(HINTS)], _asked_last(items, messages))


def _asked_last(items: Sequence[Item], messages: Sequence[Message]) -> str:
    """The answer to the last task of the plan that the teacher set; to the first one if it set none."""
    asked = [
        item.answer for each in messages if each["role"] == "teacher" for item in items if item.task in each["content"]
    ]
    return asked[-1] if asked else items[0].answer


def _steps_set(messages: Sequence[Message], is_error: Callable[[str], bool]) -> int:
    """How many steps an honest tutor has set: one with its first message, and one with every reply to a message that
    holds no error."""
    from_teacher = list(dropwhile(lambda each: each["role"] == "student", messages))
    steps = 1 if from_teacher else 0
    for said, reply in zip(from_teacher[1:], from_teacher[2:], strict=False):
        if reply["role"] == "teacher" and not is_error(said["content"]):
            steps += 1
    return steps


Reply = Callable[[str, Sequence[Message]], str]
"""The student's message, from the drawn persona and the dialogue so far."""

FRENCH = "Je ne sais pas comment le dire."
NOT_UNDERSTOOD = "I do not know what you mean."


def student_of_lesson(lesson: Lesson) -> Reply:
    """The quickstart's scripted student. Its choices depend on what was said."""

    def reply(persona: str, messages: Sequence[Message]) -> str:
        said = "|".join(each["content"] for each in messages)
        return student_reply(persona, lesson, messages, random.Random(f"{persona}|{said}"))

    return reply


def student_of_plan(plan: ParsedPlan, speaks_french: bool = False) -> Reply:
    """A student that says the phrase of the plan that the teacher's message asks for, or else the first that it shows.
    Asked for a correction, it says its last phrase again.

    Args:
        speaks_french: whether an error is an answer in French, as in the small tutor's lessons; otherwise a phrase with
            a doubled letter.
    """

    def reply(persona: str, messages: Sequence[Message]) -> str:
        phrase = _understood(plan, messages)
        if persona == ERROR_PERSONA:
            return FRENCH if speaks_french or phrase is None else misspelt(phrase.text)
        return NOT_UNDERSTOOD if phrase is None else phrase.text

    return reply


def _understood(plan: ParsedPlan, messages: Sequence[Message]) -> Phrase | None:
    """The phrase that the last message is about. If it only asks to say something again, the one before counts."""
    for each in reversed(messages):
        if each["role"] == "teacher":
            phrase = _asked_for(plan, each["content"])
            if phrase is not None or not RETRY.search(each["content"]):
                return phrase
    return None


def _asked_for(plan: ParsedPlan, text: str) -> Phrase | None:
    described = [each for each in plan.phrases if holds(text, each.meaning)]
    shown = [each for each in plan.phrases if holds(text, each.text)]
    if described or shown:
        return (described or shown)[-1 if described else 0]
    words = set(normal(text).split())
    best = max(plan.phrases, key=lambda each: _share(each, words))
    return best if _share(best, words) > 0.5 else None


def _share(phrase: Phrase, words: set[str]) -> float:
    wanted = set(normal(phrase.meaning).split())
    return len(wanted & words) / len(wanted) if wanted else 0.0


def misspelt(phrase: str) -> str:
    """The phrase with a letter of its longest word doubled."""
    word = max(re.findall(r"[^\W\d_]+", phrase), key=len)
    half = len(word) // 2
    return phrase.replace(word, word[: half + 1] + word[half:], 1)
