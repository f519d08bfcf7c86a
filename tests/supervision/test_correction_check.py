"""Tests of what a correction has to pass."""

from dataclasses import replace

import pytest

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.reviews import MessageToReview, Review
from classroom_rl.supervision.embedded import RulesSupervisor, embedded_supervisor
from classroom_rl.supervision.model_supervisor import MOST_CHARACTERS, check_correction, checked
from classroom_rl.supervision.toy_supervisor import RubricSupervisor
from tests.judges.test_rule_judge import PLAN
from tests.supervision.test_toy_supervisor import HINT, PROBLEM, Q1, Q2, WRONG

SAID = [{"role": "teacher", "content": Q1}, {"role": "student", "content": WRONG}]
QUICKSTART = MessageToReview(SAID, f"Good! {Q2}", PROBLEM)
MATHS = MessageToReview([], "It is 375.", "How many are 18 rows of 24 roles less 57?", "375")
DUTCH = MessageToReview([], "Welcome!", PLAN)
OTHER = MessageToReview([], "Welcome!", "Talk about the weather.")


@pytest.mark.parametrize(
    ("correction", "about"),
    [
        (HINT, QUICKSTART),
        ("What would you calculate first?", MATHS),
        ("You are next. What do you say?", DUTCH),
        ("What is the weather like?", OTHER),
    ],
)
def test_what_is_accepted(correction, about):
    assert check_correction(correction, about) == ""
    review = Review(valid=False, category="task", correction=correction, source="model")
    assert checked(review, about) is review


@pytest.mark.parametrize(
    ("reason", "correction", "about"),
    [
        ("it is empty", " ", MATHS),
        ("it is empty", END_OF_CONVERSATION, MATHS),
        ("characters", f"{'So ' * MOST_CHARACTERS}what now?", OTHER),
        ("the message itself", " It is  375.", MATHS),
        ("'<|'", "What now?<|im_end|>", OTHER),
        ("'<|'", "<|im_start|>assistant What now?", MATHS),
        ("'<think>'", "<think>hm</think>What now?", MATHS),
        ("'</s>'", "What now?</s>", OTHER),
        ("stored", "What now \ud800?", OTHER),
        ("not at its end", f"Bye {END_OF_CONVERSATION} and good luck!", OTHER),
        ("leak", "So it is 375, why?", MATHS),
        ("ends_early", f"Good luck! {END_OF_CONVERSATION}", MATHS),
        ("ignores_error", f"Good! {Q2} ", replace(QUICKSTART, message="")),
        ("leak", "Use boiled here. Say it again.", QUICKSTART),
        ("leak", "Say: Ik ben aan de beurt", DUTCH),
        ("format", "What now?\nStudent: 375", OTHER),
    ],
)
def test_what_is_refused(reason, correction, about):
    assert reason in check_correction(correction, about)
    found = checked(Review(valid=False, category="task", correction=correction), about)
    assert (found.valid, found.category, found.correction) == (False, "task", None)
    assert reason in found.refused_correction


def test_the_length_of_the_message_does_not_cut_its_correction():
    assert check_correction("What would you calculate first?", replace(MATHS, cut=True)) == ""


@pytest.mark.parametrize("valid", [True, None])
def test_only_an_invalid_message_has_a_correction(valid):
    assert checked(Review(valid=valid, correction="What now?"), MATHS).correction is None


def test_no_correction_is_nothing_refused():
    review = Review(valid=False, category="task")
    assert checked(review, MATHS) is review and review.refused_correction is None


def test_embedded_supervisors_by_name():
    assert isinstance(embedded_supervisor("rubric"), RubricSupervisor)
    assert isinstance(embedded_supervisor("rules"), RulesSupervisor)
    with pytest.raises(ConfigError, match="no embedded supervisor 'gpt'; there are rubric, rules"):
        embedded_supervisor("gpt")
