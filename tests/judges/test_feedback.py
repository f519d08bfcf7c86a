"""The rules about a teacher's feedback to an error, and about the student's reaction: labelled by hand."""

import pytest

from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.judges.feedback import (
    falsely_corrects,
    feedback_kind,
    gives_right_form,
    hands_over,
    nearest_phrase,
    repairs,
    shows_uptake,
)
from classroom_rl.judges.messages import ParsedPlan, Phrase

QUICKSTART = ParsedPlan(
    lesson=parse_problem("Lesson: food, cook, last week\nPlan: you, sister, brother, friends, parents")
)


SPANISH = ParsedPlan(
    (Phrase("He perdido la cartera", "I've lost my wallet"), Phrase("Es de cuero marrón", "It's of leather"))
)


SLIP = "Last week my sister cook a carrot in the garden."
RIGHT = "Last week my sister cooked a carrot in the garden."


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("Not quite. She cooked a carrot. Say it again.", "explicit"),
        ("Use cooked here. Say it again.", "explicit"),
        ("Oh, she cooked a carrot! What did your brother cook last week?", "recast"),
        ("Check the tense here: cook. Say it again.", "metalinguistic"),
        ("Cook a carrot?", "repetition"),
        ("Sorry, what do you mean?", "clarification"),
        ("Try again.", "elicitation"),
        ("Last week my sister …", "elicitation"),
        ("Good! What did your brother cook last week?", "none"),
        ("", "none"),
    ],
)
def test_kinds_of_feedback(reply, kind):
    assert feedback_kind(SLIP, reply, QUICKSTART) == kind


def test_feedback_in_open_language_goes_by_the_phrase_that_was_meant():
    assert nearest_phrase("Ha perdido la cartera.", SPANISH) == "He perdido la cartera"
    assert nearest_phrase("Buenos días", SPANISH) is None and nearest_phrase("anything", ParsedPlan()) is None
    assert feedback_kind("Ha perdido la cartera.", "He perdido la cartera. Where?", SPANISH) == "recast"
    assert feedback_kind("Ha perdido la cartera.", 'No, it is "he perdido".', SPANISH) == "explicit"


def test_a_corrected_first_word_is_the_right_form_and_a_gap_is_not():
    assert gives_right_form("Him goes home every day", "He goes home every day. Say it again.", SPANISH)
    assert not gives_right_form("my sister boil two eggs", "So my sister … two eggs? Say it again.", SPANISH)


@pytest.mark.parametrize(
    ("answer", "uptake", "repair"),
    [
        (RIGHT, True, True),
        (SLIP, True, False),
        ("Last week my brother cooked an egg in the kitchen.", False, False),
    ],
)
def test_uptake_and_repair(answer, uptake, repair):
    assert shows_uptake(SLIP, "elicitation", answer, QUICKSTART) is uptake
    assert repairs(SLIP, "elicitation", answer, QUICKSTART) is repair
    assert not shows_uptake(SLIP, "none", answer, QUICKSTART)


@pytest.mark.parametrize(
    ("reply", "corrects"),
    [
        ("No, that is not right. Say it again.", True),
        ("Check the plural here: eggs. Say it again.", True),
        ("Very good! Say it once more.", False),
        ("Good. There is something wrong with the sum, and the waiter is gone. Call him back!", False),
    ],
)
def test_false_corrections(reply, corrects):
    assert falsely_corrects(reply) is corrects


SHOWN = 'Good. "He perdido la cartera" means "I\'ve lost my wallet". '


@pytest.mark.parametrize(
    ("message", "was_said", "plan", "handed_over"),
    [
        (SHOWN + "Tell him that you have lost your wallet.", False, SPANISH, True),
        (SHOWN + "Tell him that you have lost your wallet.", True, SPANISH, False),
        (SHOWN + "Which moment does it fit?", False, SPANISH, False),
        ("Repeat after me: He perdido la cartera.", False, SPANISH, True),
        ("Say: Last week I cooked an egg in the kitchen.", False, QUICKSTART, True),
        ("What did you cook last week?", False, QUICKSTART, False),
    ],
)
def test_what_is_handed_over(message, was_said, plan, handed_over):
    assert hands_over(message, lambda _: was_said, plan) is handed_over
