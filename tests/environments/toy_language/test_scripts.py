"""The scripted ideal teacher and the scripted student, who make the corpus."""

import random

import pytest

from classroom_rl.environments.toy_language.grammar import find_slips
from classroom_rl.environments.toy_language.lessons import Lesson
from classroom_rl.environments.toy_language.scripts import (
    FAREWELL,
    RETRY,
    asked_so_far,
    ideal,
    next_question,
    play,
    student_reply,
)

LESSON = Lesson("food", "boil", "yesterday", ("you", "your sister"))
FIRST, SECOND = (question.text for question in LESSON.questions)
RIGHT, WRONG = "Yesterday I boiled an egg in the kitchen.", "Yesterday I boil an egg in the kitchen."


def dialogue(*texts: str) -> list[dict[str, str]]:
    """Messages that take turns; the teacher opens."""
    return [{"role": ("teacher", "student")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("texts", "reply"),
    [
        ((), f"Hi! {FIRST}"),
        ((f"Hi! {FIRST}", RIGHT), f"Good! {SECOND}"),
        ((f"Hi! {FIRST}", WRONG), f"Check the tense here: boil. {RETRY}"),
        (
            (f"Hi! {FIRST}", RIGHT, f"Good! {SECOND}", "Yesterday my sister boiled a cake on the bus."),
            f"Good! {FAREWELL}",
        ),
    ],
    ids=["opens", "asks on", "hints at a slip", "closes"],
)
def test_the_ideal_teacher(texts, reply):
    assert ideal(LESSON, dialogue(*texts)) == reply


def test_questions_are_those_that_the_teacher_asked_and_go_on_after_the_last():
    messages = dialogue(f"Hi! {FIRST}", "What did your sister boil yesterday?", f"Good! {FIRST}")
    assert [question.text for question in asked_so_far(messages)] == [FIRST, FIRST]
    assert next_question(LESSON, messages).text == SECOND
    assert next_question(LESSON, dialogue(f"Hi! {SECOND}")) is None, "questions that were left out are not asked later"


@pytest.mark.parametrize(("persona", "slips"), [("correct_student", 0), ("error_student", 1)])
def test_a_student_answers_the_question_with_the_slips_of_its_persona(persona, slips):
    for seed in range(20):
        sentence = student_reply(persona, LESSON, dialogue(f"Hi! {FIRST}"), random.Random(seed))
        assert sentence.startswith("Yesterday I boil") and len(find_slips(sentence)) == slips


@pytest.mark.parametrize("persona", ["correct_student", "error_student"])
def test_a_student_that_is_asked_to_repeats_its_sentence(persona):
    hinted = dialogue(f"Hi! {FIRST}", WRONG, f"Check the tense here: boil. {RETRY}")
    sentences = {student_reply(persona, LESSON, hinted, random.Random(seed)) for seed in range(20)}
    if persona == "correct_student":
        assert sentences == {RIGHT}
    else:
        assert len(sentences) > 1 and WRONG in sentences, "with another slip, or the same one"


def test_a_conversation_ends_with_the_teacher():
    messages = play(ideal, LESSON, ["correct_student"] * 5, random.Random(1))
    assert [message["role"] for message in messages] == ["teacher", "student"] * 2 + ["teacher"]
    assert messages[-1]["content"] == f"Good! {FAREWELL}", "the lesson is over before the turns are"
    assert len(play(ideal, LESSON, ["correct_student"], random.Random(1))) == 3
