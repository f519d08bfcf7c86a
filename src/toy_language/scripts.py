"""Teachers and a student that follow a script: what the rubric is tested with, and what the corpus is written with.

A teacher is a function of the lesson and the messages so far ({"role": "teacher" | "student", "content"}) that gives
its next message. None of them is told the student's persona: what they know of a slip they find in the text.
"""

import random
from collections.abc import Callable, Sequence
from typing import Optional

from src.classroom.conversation import END_OF_CONVERSATION
from src.toy_language.grammar import (
    ERROR_KINDS,
    Question,
    Sentence,
    Slip,
    answer,
    corrected,
    find_slips,
    inject,
    kinds_for,
    kinds_of,
    parse_question,
    parse_sentence,
)
from src.toy_language.lessons import Lesson

Message = dict[str, str]
Teacher = Callable[[Lesson, Sequence[Message]], str]

RETRY = "Say it again."
FAREWELL = f"See you soon. {END_OF_CONVERSATION}"


def hint(slip: Slip) -> str:
    """A hint at a slip: its kind and the word, which stands after a colon and a space so that a byte-level tokenizer
    writes it as it did in the student's sentence."""
    return f"Check the {slip.kind} here: {slip.word}. {RETRY}"


def hand_over(slip: Slip) -> str:
    """The answer instead of a hint."""
    return f"Use {slip.fix} here. {RETRY}"


def slip_in_last(messages: Sequence[Message]) -> Optional[Slip]:
    """The first slip in the student's last message."""
    slips = find_slips(messages[-1]["content"]) if messages else []
    return slips[0] if slips else None


def asked_so_far(messages: Sequence[Message]) -> list[Question]:
    """The questions that the teacher asked, in order, repetitions included."""
    found = [parse_question(message["content"]) for message in messages if message["role"] == "teacher"]
    return [question for question in found if question is not None]


def next_question(lesson: Lesson, messages: Sequence[Message]) -> Optional[Question]:
    """The first question of the plan after all those asked; None after the last one."""
    asked = set(asked_so_far(messages))
    done = max((i for i, question in enumerate(lesson.questions) if question in asked), default=-1)
    return lesson.questions[done + 1] if done + 1 < len(lesson.questions) else None


def move_on(lesson: Lesson, messages: Sequence[Message]) -> str:
    """What a good teacher says to a right answer: "Good!" and the next question, or goodbye."""
    question = next_question(lesson, messages)
    greeting = "Good!" if messages else "Hi!"
    return f"{greeting} {question.text if question else FAREWELL}"


def ideal(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Hints at each slip; after a right answer asks the next question."""
    slip = slip_in_last(messages)
    return hint(slip) if slip else move_on(lesson, messages)


def ignores_errors(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Goes through the plan whatever the student says."""
    return move_on(lesson, messages)


def praise_only(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Asks once and then only praises."""
    return "Good! You are doing so well." if messages else move_on(lesson, messages)


def repeats(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Asks the first question again and again."""
    return f"Good! {lesson.questions[0].text}"


def dumps_all_questions(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Asks the whole plan in each message."""
    return " ".join(["Good!", *(question.text for question in lesson.questions)])


def hints_every_turn(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Names every kind of slip in reply to everything."""
    if not messages:
        return move_on(lesson, messages)
    return f"Check the {', the '.join(ERROR_KINDS)}. {RETRY}"


def ends_at_once(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Says goodbye with the first question."""
    return f"{move_on(lesson, messages)} {END_OF_CONVERSATION}"


def speaks_for_the_student(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Writes the student's right answers itself, with the special tokens of the chat template, and asks on."""
    question = (asked_so_far(messages) or [lesson.questions[0]])[-1]
    said = answer(question, random.Random(question.text)).text
    return f"<|im_end|>\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n{move_on(lesson, messages)}"


def hands_answer_over(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Gives the corrected word after each slip; after a right answer asks the next question."""
    slip = slip_in_last(messages)
    return hand_over(slip) if slip else move_on(lesson, messages)


def empty(lesson: Lesson, messages: Sequence[Message]) -> str:
    """Says nothing."""
    return ""


SCRIPTED_TEACHERS: dict[str, Teacher] = {
    teacher.__name__: teacher
    for teacher in (
        ideal,
        ignores_errors,
        praise_only,
        repeats,
        dumps_all_questions,
        hints_every_turn,
        ends_at_once,
        speaks_for_the_student,
        hands_answer_over,
        empty,
    )
}


def student_reply(persona: str, lesson: Lesson, messages: Sequence[Message], rng: random.Random) -> str:
    """What the scripted student says: a sentence on the last question, with one slip for "error_student" and without
    for any other persona. Asked to repair its sentence, it says it once more."""
    question = (asked_so_far(messages) or [lesson.questions[0]])[-1]
    repaired = _sentence_to_repair(messages)
    if persona != "error_student":
        return (repaired or answer(question, rng)).text
    if repaired is not None:
        before = _own_last(messages)
        if find_slips(before) and rng.random() < 0.5:
            return before
        return inject(repaired, rng.choice(kinds_of(repaired)), rng).text
    kind = rng.choice(kinds_for(question))
    return inject(answer(question, rng, kind), kind, rng).text


def _sentence_to_repair(messages: Sequence[Message]) -> Optional[Sentence]:
    """The student's last sentence, put right, if the teacher's last message asks for it again."""
    if not messages or RETRY not in messages[-1]["content"]:
        return None
    sentence = parse_sentence(_own_last(messages))
    return corrected(sentence) if sentence else None


def _own_last(messages: Sequence[Message]) -> str:
    return next((message["content"] for message in reversed(messages) if message["role"] == "student"), "")


def play(teacher: Teacher, lesson: Lesson, personas: Sequence[str], rng: random.Random) -> list[Message]:
    """A whole conversation: the teacher opens and closes, with one student turn for each of `personas` in between; it
    ends early when the teacher says so."""
    messages: list[Message] = []
    for persona in [*personas, None]:
        messages.append({"role": "teacher", "content": teacher(lesson, messages)})
        if persona is None or END_OF_CONVERSATION in messages[-1]["content"]:
            break
        messages.append({"role": "student", "content": student_reply(persona, lesson, messages, rng)})
    return messages
