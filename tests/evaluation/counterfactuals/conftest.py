"""A lesson of four questions, and its messages."""

import random

from classroom_rl.environments.toy_language.grammar import answer, inject
from classroom_rl.environments.toy_language.lessons import Lesson, render_problem
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.tokens import Turn

LESSON = Lesson("food", "cook", "last week", ("you", "your sister", "your brother", "your friends"))
QUESTIONS = LESSON.questions
PROBLEM = Problem.of(render_problem(LESSON))


def asks(number: int) -> Turn:
    return Turn("teacher", f"Good! {QUESTIONS[number].text}")


def says(number: int, persona: str = "correct_student", right: bool = True) -> Turn:
    rng = random.Random(number)
    sentence = answer(QUESTIONS[number], rng, None if right else "tense")
    return Turn("student", (sentence if right else inject(sentence, "tense", rng)).text, persona)
