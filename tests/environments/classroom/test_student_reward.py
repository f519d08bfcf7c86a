"""The reward of a student under training: what counts as a message of the learner that it plays."""

import pytest

from classroom_rl.config.values import CORRECT_PERSONA, ERROR_PERSONA
from classroom_rl.environments.classroom.student_reward import fidelity, scaffolds, student_messages
from classroom_rl.judges.messages import read_plan
from classroom_rl.rollout.tokens import Turn
from tests.support.toy_lesson import HINT, PROBLEM, Q1, Q2, RIGHT, WRONG

TWICE_WRONG = "Yesterday I boil two egg in the kitchen."
SISTER = "Yesterday my sister boiled an egg in the kitchen."
FALSE_HINT = "Check the article here: boil. Say it again."


def lesson(*messages: tuple[str, str]) -> list[Turn]:
    """A lesson of pairs: what the tutor says, and what the student answers. An answer to an error prompt begins with
    "!"."""
    turns = []
    for tutor, student in messages:
        persona = ERROR_PERSONA if student.startswith("!") else CORRECT_PERSONA
        turns += [Turn("teacher", tutor), Turn("student", student.removeprefix("!"), persona)]
    return turns


def faithful(*messages: tuple[str, str]) -> list[bool]:
    return [message.faithful for message in student_messages(PROBLEM, lesson(*messages))]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (RIGHT, True),
        (WRONG, False),
        (f"!{WRONG}", True),
        (f"!{RIGHT}", False),
        (f"!{TWICE_WRONG}", False),  # the prompt asks for one error
        (SISTER, False),  # right, and no answer to what was asked
        ("", False),
        ("I boil.", False),  # no sentence of the language
        (f"{RIGHT} {RIGHT}", False),
        (f"{RIGHT} Well done!", False),
        (Q1, False),
    ],
)
def test_a_message_is_as_drawn_and_an_answer(said: str, expected: bool) -> None:
    assert faithful((f"Hi! {Q1}", said)) == [expected]


def test_the_tutors_words_are_no_answer() -> None:
    assert faithful((f"Hi! {RIGHT}", RIGHT)) == [False] and faithful((f"Hi! {SISTER}", RIGHT)) == [True]


def test_without_a_question_any_sentence_is_an_answer() -> None:
    assert faithful(("Hi!", SISTER)) == [True] and faithful(("Hi!", "Yes.")) == [False]


@pytest.mark.parametrize(
    ("reply", "again", "expected"),
    [
        (HINT, RIGHT, True),
        (HINT, WRONG, False),
        (HINT, f"!{WRONG}", True),  # drawn to err again
        (HINT, f"!{RIGHT}", False),
        (f"Good! {Q1}", RIGHT, False),  # it repairs after anything
        (f"Good! {Q1}", WRONG, True),
        (f"Good! {Q1}", f"!{WRONG}", True),
        (FALSE_HINT, RIGHT, False),
        (FALSE_HINT, WRONG, True),
        (f"Good! {Q2}", SISTER, True),  # another sentence: as drawn
        (f"Good! {Q2}", f"!{SISTER}", False),
        (RIGHT, RIGHT, True),  # told the right form, it says it back
    ],
)
def test_it_repairs_after_help_alone(reply: str, again: str, expected: bool) -> None:
    assert faithful((f"Hi! {Q1}", f"!{WRONG}"), (reply, again)) == [True, expected]


def test_which_replies_scaffold() -> None:
    plan = read_plan(PROBLEM)
    assert scaffolds(WRONG, HINT, plan) and scaffolds(WRONG, "Use boiled here. Say it again.", plan)
    assert not scaffolds(WRONG, FALSE_HINT, plan) and not scaffolds(WRONG, f"Good! {Q2}", plan)
    assert not scaffolds(WRONG, "Perfect! Say it again.", plan)


def test_the_reward_is_the_share_of_such_messages() -> None:
    turns = lesson((f"Hi! {Q1}", f"!{WRONG}"), (HINT, RIGHT), (f"Good! {Q2}", "Hm."))
    assert fidelity(PROBLEM, turns) == pytest.approx(2 / 3)
    assert fidelity(PROBLEM, turns[:1]) is None and fidelity("fractions", turns) is None
    turns[1] = Turn("student", WRONG, None)  # an opening attempt, for which nothing was drawn
    assert fidelity(PROBLEM, turns) == pytest.approx(1 / 2)


def test_what_the_student_thinks_does_not_count() -> None:
    assert faithful((f"Hi! {Q1}", f"<think>{WRONG}</think>{RIGHT}")) == [True]
