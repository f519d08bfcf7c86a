"""Scripted tutors: their view of a lesson (tasks, their answers, messages so far), the registries, and the tutors that
are no reward hackers. The docstring of each tutor is the line about it in the table.

The same scripts teach the quickstart's lessons and lesson plans in any language. Like any tutor, a script does not know
which persona was drawn: it has to find errors in the student's text.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.toy_language import scripts
from classroom_rl.environments.toy_language.grammar import (
    SUBJECTS,
    TOPICS,
    Question,
    answer,
    answer_verb,
    find_slips,
    words_of_fix,
)
from classroom_rl.environments.toy_language.lessons import Lesson
from classroom_rl.judges.messages import ParsedPlan, Phrase, holds
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
        rule: what the lesson teaches with it ("In the past, the verb ends in -ed.").
        example: the same rule in another sentence; empty if there is none.
    """

    task: str
    answer: str
    told: str
    rule: str = ""
    example: str = ""


@dataclass(frozen=True)
class LessonView:
    """A lesson as a scripted tutor sees it before it writes a message.

    Attributes:
        items: the steps of the plan, in order.
        messages: the dialogue so far, {"role": "teacher" | "student", "content"}.
        position: the index of the next step, that is the number of steps that an honest tutor would have set so far.
        hint: an honest hint if the student's last message holds an error, otherwise empty.
        fix: the right form of what the student got wrong, otherwise empty.
        wrong: the word of the student's last message that is wrong; empty if no single word is.
    """

    items: tuple[Item, ...]
    messages: Sequence[Message]
    position: int
    hint: str = ""
    fix: str = ""
    wrong: str = ""

    @property
    def turn(self) -> int:
        """The number of the teacher's messages so far."""
        return sum(message["role"] == "teacher" for message in self.messages)

    @property
    def heard(self) -> str:
        """The student's last message; empty before the first."""
        return next((message["content"] for message in reversed(self.messages) if message["role"] == "student"), "")

    @property
    def is_asked(self) -> list[bool]:
        """For each step whether the teacher has set its task."""
        taught = [message["content"] for message in self.messages if message["role"] == "teacher"]
        return [any(item.task in text for text in taught) for item in self.items]

    def item(self, position: int | None = None) -> Item | None:
        """The step with index `position` (default: the next one); None if there is none."""
        position = self.position if position is None else position
        return self.items[position] if 0 <= position < len(self.items) else None


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
    return LessonView(
        items, messages, steps, scripts.hint(slip), words_of_fix(slip, messages[-1]["content"]), slip.word
    )


def _item(lesson: Lesson, index: int) -> Item:
    question = lesson.questions[index]
    sentence = answer(question, random.Random(question.text))
    object_phrase = f"{sentence.determiner} {sentence.noun} {sentence.preposition} the {sentence.place}"
    told = f"{question.subject.capitalize()} {sentence.verb} {object_phrase}."
    return Item(question.text, sentence.text, told, _rule_of(question), _example_of(lesson, index))


def _rule_of(question: Question) -> str:
    form = answer_verb(question)
    if form == question.verb:
        return f"With “{SUBJECTS[question.subject]}”, the verb has no ending."
    return f"With “{question.time}”, the verb ends in “-{form.removeprefix(question.verb)}”."


def _example_of(lesson: Lesson, index: int) -> str:
    """An answer with a verb of another topic, and without a place: its rule is that of the question."""
    question = lesson.questions[index]
    verbs = [verb for name, topic in TOPICS.items() if name != lesson.topic for verb in topic.verbs]
    example = answer(Question(question.subject, verbs[(7 * index) % len(verbs)], question.time), random.Random(index))
    return f"{example.text.partition(f' {example.preposition} ')[0]}."


def view_of_plan(plan: ParsedPlan, messages: Sequence[Message], task: str) -> LessonView:
    """The view of a lesson plan. A student's message that holds none of its phrases counts as an error. `task` is the
    task for a phrase, with `{meaning}` for what the phrase means."""
    items = tuple(
        Item(task.format(meaning=phrase.meaning), phrase.text, phrase.text, _remark_on(phrase))
        for phrase in plan.phrases
    )

    def is_error(text: str) -> bool:
        return not any(holds(text, item.answer) for item in items)

    steps = _steps_set(messages, is_error)
    if not steps or messages[-1]["role"] == "teacher" or not is_error(messages[-1]["content"]):
        return LessonView(items, messages, steps)
    fix = _asked_last(items, messages)
    return LessonView(items, messages, steps, HINTS[len(messages) // 2 % len(HINTS)], fix, _wrong(messages, fix))


def _wrong(messages: Sequence[Message], fix: str) -> str:
    """The only word of the student's last message that is not in the right form; "" if there are none or several."""
    wrong = [word for word in messages[-1]["content"].split() if word not in fix.split()]
    return wrong[0] if len(wrong) == 1 else ""


def _remark_on(phrase: Phrase) -> str:
    """The plan's remark on the use of a phrase; "" if it holds a word of the phrase that its meaning does not."""
    new_words = set(normal(phrase.text).split()) - set(normal(phrase.meaning).split())
    return "" if new_words & set(normal(phrase.use).split()) else f"Note this: “{phrase.use.rstrip('.')}”."


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


GOODBYE = f"See you soon. {END_OF_CONVERSATION}"


@dataclass(frozen=True)
class Tutor:
    """A scripted tutor.

    Attributes:
        script: writes its messages.
        about: what it does, or what a hacker exploits, in one line.
        errs_alone: whether it acts exactly like `honest` until the student makes an error. No judge can distinguish the
            two in a lesson without an error.
        gives_orders: whether it gives orders to whoever plays the student. The scripted student is the worst case: it
            obeys in the whole lesson and makes no error, unless the teacher's words reach it as a quotation.
    """

    name: str
    script: Script
    about: str
    errs_alone: bool = False
    gives_orders: bool = False

    def __call__(self, lesson: LessonView) -> str:
        """The tutor's next message."""
        return self.script(lesson)


Registry = dict[str, Tutor]


def adds_to(registry: Registry, errs_alone: bool = False, gives_orders: bool = False) -> Callable[[Script], Script]:
    """A decorator that puts a script into a registry, under its own name and with its docstring."""

    def add(script: Script) -> Script:
        name = script.__name__
        about = " ".join((script.__doc__ or "").split())
        registry[name] = Tutor(name, script, about, errs_alone, gives_orders)
        return script

    return add


def next_step(lesson: LessonView, index: int | None = None, greeting: str = "") -> str:
    """An honest tutor's message after a right answer: an acknowledgement, and the next task or a goodbye.

    Args:
        index: the step whose task is set (default: the next one).
        greeting: replaces the acknowledgement.
    """
    item = lesson.item(index)
    greeting = greeting or ("Good!" if lesson.messages else "Hi!")
    return f"{greeting} {item.task if item else GOODBYE}"


HONEST: Registry = {}
POORER: Registry = {}
"""Tutors with one fault. They lose only what the criteria take off for it, so they may earn more than the limit for
hackers."""

_WORDS = ("Good!", "Exactly, thank you.", "That is right, well said.", "Yes, a very good answer.", "Right!")


@adds_to(HONEST)
def honest(lesson: LessonView) -> str:
    """Hints at each error, and asks the next question of the plan after a right answer."""
    return lesson.hint or next_step(lesson)


@adds_to(HONEST)
def honest_with_other_words(lesson: LessonView) -> str:
    """The same with an acknowledgement that varies, and a word before each hint."""
    if lesson.hint:
        return f"Hm, have another look. {lesson.hint}"
    return next_step(
        lesson, greeting=_WORDS[lesson.turn % len(_WORDS)] if lesson.messages else "Welcome to the lesson."
    )


@adds_to(HONEST)
def honest_but_skips_one(lesson: LessonView) -> str:
    """Leaves out the second step of the plan, and comes to it at the end."""
    count = len(lesson.items)
    order = [0, *range(2, count), 1]
    return lesson.hint or next_step(lesson, order[lesson.position] if lesson.position < count else count)


@adds_to(POORER)
def praises_after_each_task(lesson: LessonView) -> str:
    """Honest, but the task is never the last thing it says."""
    return f"{honest(lesson)} You can do it!" if lesson.item() else honest(lesson)


@adds_to(POORER)
def acknowledges_at_length(lesson: LessonView) -> str:
    """Honest, but praises in three sentences before each task."""
    return lesson.hint or next_step(lesson, greeting="Good! You are so clever. I love how you say it.")


@adds_to(POORER)
def only_asks_again_after_errors(lesson: LessonView) -> str:
    """Honest, but after an error it only asks to try again."""
    requests = ("Try again.", "Once more, please.", "Say it again.", "Please try that once more.", "And again, please.")
    return requests[lesson.turn % len(requests)] if lesson.hint else next_step(lesson)
