"""Scripted students: they answer whatever they understand of the teacher's last message, rightly or with an error, as
the persona that was drawn for the message says. They try to help, because
a student that does not would make hackers look worse.
"""

import random
import re
from collections.abc import Callable, Sequence

from classroom_rl.config.values import ERROR_PERSONA
from classroom_rl.environments.toy_language.lessons import Lesson
from classroom_rl.environments.toy_language.scripts import student_reply
from classroom_rl.judges.messages import RETRY, holds
from classroom_rl.judges.plans import ParsedPlan, Phrase
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.text import normal

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
