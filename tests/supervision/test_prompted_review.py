"""Tests of the prompts of supervisors that are models, and of reading their answers."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import default_penalties
from classroom_rl.config.load import ROOT
from classroom_rl.errors import JudgeOutputError
from classroom_rl.rollout.engine import ConversationFacts
from classroom_rl.rollout.prompts import variables_of
from classroom_rl.rollout.reviews import MessageToReview
from classroom_rl.supervision.model_supervisor import parse_review, review_messages, review_schema

PENALTIES = default_penalties()
LANGUAGE, MATHS = (str(ROOT / f"prompt_templates/supervisors/{name}_tutor.txt") for name in ("language", "maths"))
GOOD = {"critique": "Fine.", "category": "none", "valid": True, "correction": ""}
BAD = {"critique": "It gives 5.", "category": "leak", "valid": False, "correction": "What now?"}


def test_an_invalid_and_a_valid_answer():
    found = parse_review(f"Let me think. {json.dumps(BAD)}", PENALTIES)
    assert (found.valid, found.category, found.critique, found.correction) == (
        *(False, "leak", "It gives 5.", "What now?"),
    )
    assert found.source == "model" and found.penalty is None and "Let me think" in found.raw
    fine = parse_review(json.dumps(GOOD | {"correction": "Or so?"}), PENALTIES)
    assert (fine.valid, fine.category, fine.correction) == (True, "", None)


@pytest.mark.parametrize("nothing", ["", "  ", None])
def test_no_correction(nothing):
    assert parse_review(json.dumps(BAD | {"correction": nothing}), PENALTIES).correction is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("It is fine.", "no JSON object"),
        (json.dumps(GOOD) + json.dumps(BAD), "2 different JSON objects"),
        (json.dumps(BAD)[:-20], "no JSON object"),
        *((json.dumps({k: v for k, v in BAD.items() if k != key}), f"has no {key}") for key in BAD),
        (json.dumps(BAD | {"valid": "false"}), "valid is 'false', not a bool"),
        (json.dumps(BAD | {"valid": 0}), "valid is 0, not a bool"),
        (json.dumps(BAD | {"critique": None}), "critique is None, not a str"),
        (json.dumps(BAD | {"category": None}), "category is None, not a str"),
        (json.dumps(BAD | {"category": ["leak"]}), "not a str"),
        (json.dumps(BAD | {"correction": 7}), "correction is 7, not a str"),
        (json.dumps(BAD | {"category": "rude"}), "'rude', not one of"),
        (json.dumps(BAD | {"category": ""}), "'', not one of"),
        (json.dumps(BAD | {"category": "-2"}), "'-2', not one of"),
        (json.dumps(BAD | {"valid": True}), "contradicts itself"),
        (json.dumps(GOOD | {"valid": False}), "contradicts itself"),
    ],
)
def test_answers_that_cannot_be_read(text, why):
    with pytest.raises(JudgeOutputError, match=why):
        parse_review(text, PENALTIES)


answers = st.fixed_dictionaries(
    {},
    optional={
        "critique": st.text() | st.none(),
        "category": st.sampled_from([*PENALTIES, "none", "x"]) | st.integers(),
        "valid": st.booleans() | st.integers(0, 1),
        "correction": st.text() | st.none() | st.integers(),
    },
)


@given(answers.map(json.dumps) | st.text())
def test_an_answer_is_read_or_an_error(text):
    try:
        found = parse_review(text, PENALTIES)
    except JudgeOutputError:
        return
    assert found.valid == (not found.category)
    f"{found.critique}{found.correction}{found.raw}".encode()


def test_the_schema_has_the_critique_first_and_no_number():
    schema = review_schema(PENALTIES)
    assert list(schema["properties"]) == schema["required"] == ["critique", "category", "valid", "correction"]
    assert schema["properties"]["category"]["enum"] == [*PENALTIES, "none"]
    assert schema["additionalProperties"] is False and "number" not in json.dumps(schema)


@pytest.mark.parametrize("path", [LANGUAGE, MATHS])
def test_prompts_show_the_lesson_and_no_persona(path):
    said = [{"role": "teacher", "content": "One?\nSTUDENT: two"}, {"role": "student", "content": "Three."}]
    facts = ConversationFacts((None, "error_student"), 15)
    about = MessageToReview(said, "Four?\n# Your answer\n{{ five }}", "The problem.", "forty-two", facts)
    (asked,) = review_messages(path, about)
    assert asked["role"] == "user" and "error_student" not in asked["content"]
    for shown in ("The problem.", "One?\n    STUDENT: two", "[2] STUDENT: Three.", "Four?\n    # Your answer"):
        assert shown in asked["content"]
    assert "{{ five }}" in asked["content"] and "never an" in asked["content"]
    assert ("forty-two" in asked["content"]) == (path == MATHS)
    opening = review_messages(path, MessageToReview([], "Hello?", "The problem."))[0]["content"]
    assert "(nothing yet" in opening and "[1]" in opening


@pytest.mark.parametrize("path", [LANGUAGE, MATHS])
def test_prompts_explain_the_categories_and_name_no_prices(path):
    text = Path(path).read_text(encoding="utf-8")
    listed = text.split("# The categories")[1].split("# The correction")[0]
    explained = [line.split(":")[0][2:] for line in listed.splitlines() if line.startswith("- ")]
    missing = {"wrong_maths"} if path == LANGUAGE else set()
    assert set(explained) == {*PENALTIES, "none"} - missing
    assert not any(f"{price:g}" in text for price in PENALTIES.values())
    assert variables_of(path) <= {"conversation", "message", "problem", "answer"}
