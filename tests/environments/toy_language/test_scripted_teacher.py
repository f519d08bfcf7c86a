"""Scripted tutors: what each says next, and how they stand in for an engine."""

import asyncio

import pytest

from classroom_rl.config.evaluation import ACKNOWLEDGES, IDEAL
from classroom_rl.config.values import SCRIPT
from classroom_rl.environments.toy_language.lessons import Lesson, render_problem
from classroom_rl.environments.toy_language.scripted_teacher import ScriptedTeacher
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.rollout.engine import Completion, Sampling

LESSON = Lesson("food", "boil", "yesterday", ("you", "your sister"))
FIRST, SECOND = (question.text for question in LESSON.questions)
RIGHT, WRONG = "Yesterday I boiled an egg in the kitchen.", "Yesterday I boil an egg in the kitchen."


def reply(
    script: str, *dialogue: str, prompt: str = f"You teach Sam.\n{render_problem(LESSON)}\nBe kind."
) -> Completion:
    """The script's next message; the teacher opened the dialogue."""
    messages = [{"role": "user", "content": prompt}]
    messages += [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(dialogue)]
    return asyncio.run(ScriptedTeacher(f"{SCRIPT}{script}").chat(messages, Sampling(1.0)))


@pytest.mark.parametrize(
    ("script", "to_a_slip", "to_a_right_answer"),
    [
        (ACKNOWLEDGES, "Good!", "Good!"),
        (IDEAL, "Check the tense here: boil. Say it again.", f"Good! {SECOND}"),
        ("corrects", f"Say: {RIGHT}", f"Good! {SECOND}"),
        ("gives_away", f"Say: {RIGHT}", f"Good! {SECOND} Say: Yesterday my sister boiled "),
    ],
)
def test_what_a_script_says(script, to_a_slip, to_a_right_answer):
    assert reply(script, f"Hi! {FIRST}", WRONG).text == to_a_slip
    assert reply(script, f"Hi! {FIRST}", RIGHT).text.startswith(to_a_right_answer)


def test_a_script_that_gives_away_closes_a_lesson_that_is_over():
    assert "Say:" not in reply("gives_away", f"Hi! {SECOND}", RIGHT).text


def test_a_script_gives_text_and_no_tokens():
    answer = reply(ACKNOWLEDGES)
    assert (answer.ids, answer.logprobs, answer.ended) == ((), (), True) and answer.tokens > 0
    health = ScriptedTeacher(f"{SCRIPT}{IDEAL}").health()
    assert (health.model, health.engine, health.pids) == (f"{SCRIPT}{IDEAL}", "script", [])


def test_a_script_that_does_not_exist_and_a_lesson_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="no scripted tutor 'script:idle'; there are script:"):
        ScriptedTeacher(f"{SCRIPT}idle")
    with pytest.raises(DataError, match="none is in its prompt: 'Solve x"):
        reply(IDEAL, prompt="Solve x + 1 = 2.")
