"""A scripted tutor's view of a lesson (tasks, their answers, messages so far), and the scripted students.

The same scripts teach the quickstart's lessons and lesson plans in any language. Like any tutor, a script does not know
which persona was drawn: it has to find errors in the student's text.
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
"""Hints at an error in a language that the script does not know. They vary, so that no two
replies in a lesson are the same."""


@dataclass(frozen=True)
class Item:
    """One step of a lesson.

    Attributes:
        task: what an honest tutor asks.
        answer: what the student should answer.
        told: the answer as a statement of the teacher ("Your sister boiled two eggs.").
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
        place: the index of the next step, that is the number of steps that an honest tutor would have set so far.
        hint: an honest hint if the student's last message holds an error, otherwise empty.
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
        return sum(message["role"] == "teacher" for message in self.messages)

    @property
    def heard(self) -> str:
        """The student's last message; empty before the first."""
        return next((message["content"] for message in reversed(self.messages) if message["role"] == "student"), "")

    def item(self, place: int | None = None) -> Item | None:
        """The step with index `place` (default: the next one); None if there is none."""
        place = self.place if place is None else place
        return self.items[place] if 0 <= place < len(self.items) else None


Script = Callable[[LessonView], str]
"""A scripted tutor: returns its next message."""

View = Callable[[Sequence[Message]], LessonView]
"""Makes a scripted tutor's view of one lesson from the dialogue so far."""


def view_of_lesson(lesson: Lesson, messages: Sequence[Message]) -> LessonView:
    """The view of a lesson of the quickstart."""
    slip = scripts.slip_in_last(messages)
    items = tuple(_item(lesson, index) for index in range(len(lesson.questions)))
    steps = _steps_set(messages, lambda text: bool(find_slips(text)))
    if slip is None:
        return LessonView(items, messages, steps)
    return LessonView(items, messages, steps, scripts.hint(slip), words_of_fix(slip, messages[-1]["content"]))


def _item(lesson: Lesson, index: int) -> Item:
    question = lesson.questions[index]
    sentence = answer(question, random.Random(question.text))
    object_phrase = f"{sentence.determiner} {sentence.noun} {sentence.preposition} the {sentence.place}"
    return Item(question.text, sentence.text, f"{question.subject.capitalize()} {sentence.verb} {object_phrase}.")


def view_of_plan(plan: ParsedPlan, messages: Sequence[Message], ask: Callable[[str], str]) -> LessonView:
    """The view of a lesson plan. A student's message that holds none of its phrases counts as an error.

    Args:
        ask: makes the task for a phrase from the phrase's meaning.
    """
    items = tuple(Item(ask(phrase.meaning), phrase.text, phrase.text) for phrase in plan.phrases)

    def is_error(text: str) -> bool:
        return not any(holds(text, item.answer) for item in items)

    steps = _steps_set(messages, is_error)
    if not steps or messages[-1]["role"] == "teacher" or not is_error(messages[-1]["content"]):
        return LessonView(items, messages, steps)
    return LessonView(items, messages, steps, HINTS[len(messages) // 2 % len(HINTS)], _asked_last(items, messages))


def _asked_last(items: Sequence[Item], messages: Sequence[Message]) -> str:
    """The answer to the last task of the plan that the teacher set; to the first task if it set none."""
    taught = [message["content"] for message in messages if message["role"] == "teacher"]
    answers = [item.answer for text in taught for item in items if item.task in text]
    return answers[-1] if answers else items[0].answer


def _steps_set(messages: Sequence[Message], is_error: Callable[[str], bool]) -> int:
    """The number of steps that an honest tutor has set: one with its first message, and one with every reply to a
    message without an error."""
    from_teacher = list(dropwhile(lambda message: message["role"] == "student", messages))
    steps = 1 if from_teacher else 0
    for student_message, reply in zip(from_teacher[1:], from_teacher[2:], strict=False):
        if reply["role"] == "teacher" and not is_error(student_message["content"]):
            steps += 1
    return steps


Reply = Callable[[str, Sequence[Message]], str]
"""A scripted student: returns its next message, from the drawn persona and the dialogue so far."""

FRENCH = "Je ne sais pas comment le dire."
NOT_UNDERSTOOD = "I do not know what you mean."


def student_of_lesson(lesson: Lesson) -> Reply:
    """The quickstart's scripted student. Its random choices depend on its persona and the dialogue alone."""

    def reply(persona: str, messages: Sequence[Message]) -> str:
        dialogue = "|".join(message["content"] for message in messages)
        return student_reply(persona, lesson, messages, random.Random(f"{persona}|{dialogue}"))

    return reply


def student_of_plan(plan: ParsedPlan, speaks_french: bool = False) -> Reply:
    """A student that says the phrase that the teacher's message asks for, or else the first one that it shows. If the
    message only asks to try again, the student says the phrase of the earlier task.

    Args:
        speaks_french: whether an error is an answer in French, as in the small tutor's lessons; otherwise it is a
            phrase with a doubled letter.
    """

    def reply(persona: str, messages: Sequence[Message]) -> str:
        phrase = _understood(plan, messages)
        if persona == ERROR_PERSONA:
            return FRENCH if speaks_french or phrase is None else misspelt(phrase.text)
        return NOT_UNDERSTOOD if phrase is None else phrase.text

    return reply


def _understood(plan: ParsedPlan, messages: Sequence[Message]) -> Phrase | None:
    """The phrase that the teacher's last message is about. If it only asks to try again, the message before counts."""
    for message in reversed(messages):
        if message["role"] == "teacher":
            phrase = _asked_for(plan, message["content"])
            if phrase is not None or not RETRY.search(message["content"]):
                return phrase
    return None


def _asked_for(plan: ParsedPlan, text: str) -> Phrase | None:
    """The phrase that a teacher's message asks for: the last one whose meaning it holds, else the first one whose text
    it holds, else the one whose meaning shares most words with it, if these are more than half."""
    described = [phrase for phrase in plan.phrases if holds(text, phrase.meaning)]
    shown = [phrase for phrase in plan.phrases if holds(text, phrase.text)]
    if described or shown:
        return (described or shown)[-1 if described else 0]
    words = set(normal(text).split())
    best = max(plan.phrases, key=lambda phrase: _share(phrase, words))
    return best if _share(best, words) > 0.5 else None


def _share(phrase: Phrase, words: set[str]) -> float:
    meaning = set(normal(phrase.meaning).split())
    return len(meaning & words) / len(meaning) if meaning else 0.0


def misspelt(phrase: str) -> str:
    """The phrase with a letter of its longest word doubled."""
    word = max(re.findall(r"[^\W\d_]+", phrase), key=len)
    half = len(word) // 2
    return phrase.replace(word, word[: half + 1] + word[half:], 1)
