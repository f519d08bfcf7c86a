"""The scripted ideal teacher and the scripted student. They make the corpus, and test the toy judge.

A teacher is a function from the lesson and the messages so far ({"role": "teacher" | "student", "content"}) to its next
message. A teacher does not know the student's persona: it finds slips in the text.
"""

import random
from collections.abc import Callable, Sequence
from typing import Optional

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.toy_language.grammar import (
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
from classroom_rl.environments.toy_language.lessons import Lesson

DialogueMessage = dict[str, str]
Teacher = Callable[[Lesson, Sequence[DialogueMessage]], str]

RETRY = "Say it again."
FAREWELL = f"See you soon. {END_OF_CONVERSATION}"


def hint(slip: Slip) -> str:
    """A hint at a slip: its kind and the word. The word follows a space, so that a byte-level tokenizer encodes it like
    the one in the student's sentence."""
    return f"Check the {slip.kind} here: {slip.word}. {RETRY}"


def hand_over(slip: Slip) -> str:
    """The corrected word instead of a hint."""
    return f"Use {slip.fix} here. {RETRY}"


def slip_in_last(messages: Sequence[DialogueMessage]) -> Optional[Slip]:
    """The first slip in the last message; None without one."""
    slips = find_slips(messages[-1]["content"]) if messages else []
    return slips[0] if slips else None


def asked_so_far(messages: Sequence[DialogueMessage]) -> list[Question]:
    """The questions that the teacher has asked, in order, repetitions included."""
    questions = [parse_question(message["content"]) for message in messages if message["role"] == "teacher"]
    return [question for question in questions if question is not None]


def next_question(lesson: Lesson, messages: Sequence[DialogueMessage]) -> Optional[Question]:
    """The lesson's question after the last one that was asked; None after the last question of the lesson."""
    asked_questions = set(asked_so_far(messages))
    last_index = max(
        (index for index, question in enumerate(lesson.questions) if question in asked_questions), default=-1
    )
    return lesson.questions[last_index + 1] if last_index + 1 < len(lesson.questions) else None


def move_on(lesson: Lesson, messages: Sequence[DialogueMessage]) -> str:
    """What a good teacher replies to a right answer: "Good!" and the next question, or goodbye."""
    question = next_question(lesson, messages)
    greeting = "Good!" if messages else "Hi!"
    return f"{greeting} {question.text if question else FAREWELL}"


def ideal(lesson: Lesson, messages: Sequence[DialogueMessage]) -> str:
    """Hint at each slip; after a right answer, ask the next question."""
    slip = slip_in_last(messages)
    return hint(slip) if slip else move_on(lesson, messages)


def student_reply(persona: str, lesson: Lesson, messages: Sequence[DialogueMessage], rng: random.Random) -> str:
    """The scripted student's message: an answer to the last question, with one slip if the persona is "error_student",
    otherwise without. If the teacher asks for a correction, the student repeats its sentence."""
    question = (asked_so_far(messages) or [lesson.questions[0]])[-1]
    corrected_sentence = _sentence_to_repair(messages)
    if persona != "error_student":
        return (corrected_sentence or answer(question, rng)).text
    if corrected_sentence is not None:
        previous = _last_student_message(messages)
        # Half of the time an error_student repeats its mistake, otherwise it makes a new one.
        if find_slips(previous) and rng.random() < 0.5:
            return previous
        return inject(corrected_sentence, rng.choice(kinds_of(corrected_sentence)), rng).text
    kind = rng.choice(kinds_for(question))
    return inject(answer(question, rng, kind), kind, rng).text


def _sentence_to_repair(messages: Sequence[DialogueMessage]) -> Optional[Sentence]:
    """The student's last sentence, corrected, if the teacher's last message asks to repeat it; otherwise None."""
    if not messages or RETRY not in messages[-1]["content"]:
        return None
    sentence = parse_sentence(_last_student_message(messages))
    return corrected(sentence) if sentence else None


def _last_student_message(messages: Sequence[DialogueMessage]) -> str:
    return next((message["content"] for message in reversed(messages) if message["role"] == "student"), "")


def play(teacher: Teacher, lesson: Lesson, personas: Sequence[str], rng: random.Random) -> list[DialogueMessage]:
    """A whole conversation. The teacher opens and closes it; in between, there is one student turn for each of
    `personas`, unless the teacher ends it earlier."""
    messages: list[DialogueMessage] = []
    for persona in [*personas, None]:
        messages.append({"role": "teacher", "content": teacher(lesson, messages)})
        if persona is None or END_OF_CONVERSATION in messages[-1]["content"]:
            break
        messages.append({"role": "student", "content": student_reply(persona, lesson, messages, rng)})
    return messages
