"""Tests of the rows of reviews that trackers show."""

from classroom_rl.results.supervision_summary import REVIEW_COLUMNS, review_rows
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.tokens import Turn
from tests.support.synthetic_run import record_of

LEAK = Review(False, "leak", -2.0, "It gives the answer away.", "What did she eat?")
FINE = Review(True, "", 0.0)


def rows_of(*turns: Turn) -> list[dict]:
    record = record_of("lesson", turns).model_copy(update={"step": 5})
    return [dict(zip(REVIEW_COLUMNS, row, strict=True)) for row in review_rows([record])]


def test_a_message_that_was_heard_as_it_was_written():
    [row] = rows_of(
        Turn("teacher", "Hi!", given=True), Turn("student", "Hello."), Turn("teacher", "Eggs!", review=LEAK)
    )
    assert row == {
        "step": 5,
        "conversation": "c-0000",
        "turn": 2,
        "draft": "Eggs!",
        "valid": False,
        "category": "leak",
        "penalty": -2.0,
        "critique": "It gives the answer away.",
        "correction": "What did she eat?",
        "heard": "Eggs!",
    }


def test_a_message_that_was_written_again_has_a_row_for_each_draft():
    rows = rows_of(Turn("teacher", "And?", review=FINE, drafts=(Draft("Eggs!", 3, LEAK), Draft("Eggs?", 3, LEAK))))
    assert [(row["draft"], row["valid"], row["heard"]) for row in rows] == [
        ("Eggs!", False, "And?"),
        ("Eggs?", False, "And?"),
        ("And?", True, "And?"),
    ]
    assert rows[2]["correction"] is None and rows[2]["category"] == ""


def test_a_replaced_message_is_shown_as_its_draft_once():
    text = LEAK.correction
    [row] = rows_of(Turn("teacher", text, review=LEAK, drafts=(Draft("Eggs!", 3, LEAK),), replaced=True))
    assert (row["draft"], row["valid"], row["correction"], row["heard"]) == ("Eggs!", False, text, text)


def test_without_a_verdict_the_reason_is_shown():
    [row] = rows_of(Turn("teacher", "Hm.", review=Review(error="the supervisor did not answer")))
    assert (row["valid"], row["penalty"], row["critique"]) == (None, None, "the supervisor did not answer")


def test_conversations_without_a_supervisor_have_no_rows():
    assert rows_of(Turn("teacher", "Hi!"), Turn("student", "Hello.")) == []
