"""The corpus on which the quickstart's model is fine-tuned before RL: chats of a teacher and of a student with two
personas.

Each training sample is a chat as the classroom renders it for one role, the teacher or the student. The corpus teacher
uses every kind of reply, but its most frequent ones are bad: it chatters after its task and ignores mistakes. RL has to
make the good replies the frequent ones.
"""

import random
from collections.abc import Sequence
from typing import Any, Optional

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.toy_language.grammar import (
    ERROR_KINDS,
    Sentence,
    Slip,
    answer,
    find_slips,
    inject,
    kinds_for,
    parse_sentence,
)
from classroom_rl.environments.toy_language.lessons import Lesson, render_problem
from classroom_rl.environments.toy_language.scripts import (
    FAREWELL,
    DialogueMessage,
    asked_so_far,
    hand_over,
    hint,
    ideal,
    next_question,
    play,
    slip_in_last,
)
from classroom_rl.rollout.prompts import render
from classroom_rl.system.shipped import ROOT

PROMPTS = ROOT / "prompt_templates" / "quickstart"
PERSONAS = {"correct_student": "student_correct.txt", "error_student": "student_error.txt"}
STUDENT_NAMES = ("Alex", "Jamie", "Taylor", "Jordan", "Sam", "Casey", "Morgan", "Riley", None)
STUDENT_TURNS = 4

TEACHER_ROWS = 5000
STUDENT_ROWS = 5000
DRILL_ROWS = 3000
SENTENCES_PER_DRILL = 6
TEACHER_MEETS_ERRORS = 0.4
"""Share of error turns in the teacher's samples: twice that of the classroom, so that the model sees enough of them."""

TO_RIGHT_ANSWERS = {
    "ask": 0.30,
    "ask_and_chatter": 0.38,
    "praise_and_ask": 0.12,
    "repeat": 0.06,
    "praise": 0.04,
    "correct": 0.06,
    "leave": 0.02,
}
TO_ERRORS = {"pass_over": 0.50, "hint": 0.30, "hint_and_chatter": 0.08, "hand_over": 0.12}
"""What the corpus teacher does after right answers and after errors, with its share. Shares add up to 1."""

DRILL_PROMPT = "You teach English. Hint at each mistake."
_ACKNOWLEDGEMENTS = {"Good!": 0.8, "Great!": 0.1, "Well done!": 0.1}
_CHATTER = {"Take your time.": 0.6, "You can do it.": 0.2, "I like your English.": 0.2}
_PRAISE = "You are doing so well."

Row = dict[str, list[dict[str, Any]]]
"""One training sample: {"messages": [{"role", "content", "weight"}, …]}."""


class HabitualTeacher:
    """A teacher that draws each of its replies from `TO_RIGHT_ANSWERS` or `TO_ERRORS`."""

    def __init__(self, rng: random.Random, name: Optional[str] = None):
        self._rng = rng
        self._name = name

    def __call__(self, lesson: Lesson, messages: Sequence[DialogueMessage]) -> str:
        if not messages:
            greeting = f"Hi {self._name}!" if self._name else "Hi!"
            return self._ask(greeting, lesson, messages, chatters=self._rng.random() < 0.5)
        slip = slip_in_last(messages)
        move = self._draw(TO_ERRORS) if slip else "pass_over"
        if move in ("hint", "hint_and_chatter"):
            return hint(slip) + (f" {self._draw(_CHATTER)}" if move == "hint_and_chatter" else "")
        return hand_over(slip) if move == "hand_over" else self._go_on(lesson, messages, may_correct=not slip)

    def _go_on(self, lesson: Lesson, messages: Sequence[DialogueMessage], may_correct: bool) -> str:
        move = self._draw({name: share for name, share in TO_RIGHT_ANSWERS.items() if may_correct or name != "correct"})
        acknowledgement = self._draw(_ACKNOWLEDGEMENTS)
        sentence = parse_sentence(messages[-1]["content"])
        if move == "correct" and sentence is not None:
            return hint(self._invented_slip(sentence))
        if move == "praise_and_ask":
            return self._ask(f"{acknowledgement} {_PRAISE}", lesson, messages)
        if move == "repeat":
            return f"{acknowledgement} {asked_so_far(messages)[-1].text}"
        if move in ("praise", "leave"):
            return f"{acknowledgement} {_PRAISE if move == 'praise' else FAREWELL}"
        return self._ask(acknowledgement, lesson, messages, chatters=move == "ask_and_chatter")

    def _ask(self, opening: str, lesson: Lesson, messages: Sequence[DialogueMessage], chatters: bool = False) -> str:
        question = next_question(lesson, messages)
        reply = f"{opening} {question.text if question else FAREWELL}"
        return f"{reply} {self._draw(_CHATTER)}" if chatters and question else reply

    def _invented_slip(self, sentence: Sentence) -> Slip:
        kind = self._rng.choice(ERROR_KINDS)
        words = {"article": sentence.noun, "plural": sentence.noun, "preposition": sentence.preposition}
        return Slip(kind, words.get(kind, sentence.verb), "")

    def _draw(self, shares: dict[str, float]) -> str:
        return self._rng.choices(list(shares), list(shares.values()))[0]


def make_corpus(lessons: Sequence[Lesson], seed: int) -> list[Row]:
    """The samples {"messages": [{"role", "content", "weight"}, …]} of both roles, shuffled. An assistant message with
    "weight" 0 is context: no loss is computed on it."""
    rng = random.Random(f"corpus|{seed}")
    rows = [teacher_row(rng.choice(lessons), rng) for _ in range(TEACHER_ROWS)]
    rows += [student_row(rng.choice(lessons), rng) for _ in range(STUDENT_ROWS)]
    rows += [drill_row(lessons, rng) for _ in range(DRILL_ROWS)]
    rng.shuffle(rows)
    return rows


def teacher_row(lesson: Lesson, rng: random.Random) -> Row:
    """A conversation in which the assistant is the teacher. The loss counts all its messages."""
    name = rng.choice(STUDENT_NAMES)
    personas = _draw_personas(rng, TEACHER_MEETS_ERRORS)
    dialogue = play(HabitualTeacher(rng, name), lesson, personas, rng)
    system = _prompt("teacher.txt", lesson, name)
    return _row(
        system, [(message["content"], "assistant" if message["role"] == "teacher" else "user") for message in dialogue]
    )


def student_row(lesson: Lesson, rng: random.Random) -> Row:
    """A conversation in which the assistant is the student, with the prompt of one persona.

    In half of the samples the persona stays the same, and the loss counts all answers. In the others it changes from
    turn to turn, as in the classroom. The loss then counts only the last answer, whose persona the prompt describes.
    """
    persona, name = rng.choice(list(PERSONAS)), rng.choice(STUDENT_NAMES)
    keeps_persona = rng.random() < 0.5
    turns = STUDENT_TURNS if keeps_persona else rng.randint(1, STUDENT_TURNS)
    personas = [persona] * turns if keeps_persona else [*_draw_personas(rng, 0.3)[: turns - 1], persona]
    teacher = ideal if rng.random() < 0.4 else HabitualTeacher(rng, name)
    dialogue = play(teacher, lesson, personas, rng)
    while dialogue and dialogue[-1]["role"] == "teacher":
        dialogue.pop()
    if not dialogue:
        return student_row(lesson, rng)
    chat = [
        (_without_end_mark(turn["content"]), "user" if turn["role"] == "teacher" else "assistant") for turn in dialogue
    ]
    row = _row(_prompt(PERSONAS[personas[len(dialogue) // 2 - 1]], lesson, name), chat)
    if not keeps_persona:
        for message in row["messages"][:-1]:
            message["weight"] = 0
    return row


def drill_row(lessons: Sequence[Lesson], rng: random.Random) -> Row:
    """A chat of single sentences, each answered with the right hint, or with "Good!" if it has no slip.

    Conversations contain too few hints to learn from. Without drills, RL finds that ignoring mistakes gives more reward
    than random hints.
    """
    chat = []
    for _ in range(SENTENCES_PER_DRILL):
        question = rng.choice(rng.choice(lessons).questions)
        kind = rng.choice(kinds_for(question)) if rng.random() < 0.7 else None
        sentence = answer(question, rng, kind)
        text = (inject(sentence, kind, rng) if kind else sentence).text
        slips = find_slips(text)
        chat += [(text, "user"), (hint(slips[0]) if slips else "Good!", "assistant")]
    return _row(DRILL_PROMPT, chat)


def _without_end_mark(text: str) -> str:
    return text.replace(END_OF_CONVERSATION, "").strip()


def _draw_personas(rng: random.Random, error_rate: float) -> list[str]:
    return rng.choices(list(PERSONAS), [1 - error_rate, error_rate], k=STUDENT_TURNS)


def _prompt(template: str, lesson: Lesson, name: Optional[str]) -> str:
    problem = render_problem(lesson)
    return render(str(PROMPTS / template), student_name=name, problem=problem, include_thinking=False)


def _row(system: str, chat: Sequence[tuple[str, str]]) -> Row:
    messages = [{"role": role, "content": content, "weight": 1} for content, role in chat]
    return {"messages": [{"role": "system", "content": system, "weight": 1}, *messages]}
