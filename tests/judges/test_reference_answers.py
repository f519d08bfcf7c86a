"""Reading numbers, equations and reference answers, and finding the answer in a message."""

import json
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from classroom_rl.config.load import ROOT
from classroom_rl.judges.reference_answers import (
    equations,
    gives_away,
    gives_wrong_result,
    has_answered,
    has_been_said,
    read_number,
    read_reference,
)

CINEMA = "A cinema has 18 rows of 24 roles each. 57 roles stay empty. How many people watch the film?"
ROWS = [
    json.loads(row)
    for split in ("train", "test")
    for row in (ROOT / f"data/maths/{split}.jsonl").read_text(encoding="utf-8").splitlines()
]


# Arithmetic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("−0.5", Fraction(-1, 2)),
        ("1,234.5", Fraction(2469, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"4\frac{1}{2}", Fraction(9, 2)),
        (r"\dfrac{1}{0}", None),
        ("1" * 400, None),
        ("٣", None),
        ("3x", None),
        ("__import__('os')", None),
    ],
)
def test_numbers(text, value):
    assert read_number(text) == value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("12 × 4 = 46", [False]),
        (r"$12 \times 4 = 48$.", [True]),
        (r"\(3 \cdot 4 = 13\)", [False]),
        ("3 x 4 = 13", [False]),
        (r"\frac{1}{2} + \frac{1}{3} = \frac{5}{6}", [True]),
        (r"\frac{1}{2} + \frac{1}{3} = \frac{2}{5}", [False]),
        ("$3 + 4 = 7$ and $4 + 5 = 10$", [True, False]),
        ("1,000 + 1 = 1,002.", [False]),
        ("10 / 3 = 3.33", [True]),
        ("20 / 3 = 6.67", [True]),
        ("0.1 + 0.2 = 0.3", [True]),
        ("10 / 3 = 3", [False]),
        ("9 - 4 = -5", [False]),
        ("5 / 0 = 3", [True]),
        # parts of longer expressions, variables, units of one letter, other notations
        *(
            (text, [])
            for text in (
                "2 + 3 × 4 = 14",
                "3 + 4 = 7 × 2",
                "- 3 + 5 = 8",
                "x - 3 + 5 = 2",
                "180 - 47 - 68 = 65",
                "3x + 5 = 20",
                "2 + 5x = 3",
                "(2)3 + 4 = 9",
                "2(3 + 4 = 8",
                "2^3 + 1 = 9",
                "7 / 2 = 3 remainder 1",
                "17 + 5 = 2 (mod 20)",
                "5 + 1 = 4,5",
                "9:47 + 3 = 12",
                "7 - 3 = 5 m",
                "1/2 + 1/3 = 2/5",
            )
        ),
    ],
)
def test_equations(text, found):
    assert [equation.holds for equation in equations(text)] == found


@given(st.integers(0, 999), st.integers(0, 999), st.integers(1, 50), st.sampled_from("+-×"))
def test_right_equations_hold_and_wrong_ones_do_not(left, right, off, sign):
    value = {"+": left + right, "-": left - right, "×": left * right}[sign]
    (right_one,) = equations(f"So {left} {sign} {right} = {value}.")
    (wrong_one,) = equations(f"So {left} {sign} {right} = {value + off}.")
    assert right_one.holds and not wrong_one.holds


@given(st.text(max_size=300) | st.text("0123456789+-*/=().,^ x\\{}frac", max_size=300))
@example("9" * 100_000)
@example("1 / " * 20_000)
@example(" " * 50_000 + "=")
@settings(deadline=None)
def test_equations_never_raise(text):
    list(equations(text))


# The reference answer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("375", "So 432 - 57 is 375."),
        ("375", "It is three more than 372, namely 375, isn't it?"),
        ("2250", "2,250 drips"),
        ("x = 6", "so $x = 6$. Do you see?"),
        ("x = 6", "Could it be 6?"),
        ("x = 6", "The answer is six."),
        ("12", "So the result: 12!"),
        ("12", "3 · 4 = 12. Do you agree?"),
        ("24", r"Therefore \boxed{24}."),
        ("-12", "That gives −12."),
        (r"\frac{5}{4}", "that is 5/4"),
        (r"\frac{5}{4}", "so it is 1.25 then"),
        (r"\frac{5}{4}", r"$\frac{10}{8}$ then"),
        (r"36\%", "That is 36 percent of them."),
        (r"80^\circ", r"So x is $80^\circ$."),
        (r"833 \text{ ml}", "Each gets 833 ml."),
        (r"\{-2, 7\}", "so $x = -2$ or $x = 7$."),
        (r"\{-2, 7\}", "The solutions are 7 and -2"),
        ("2x^2 + 7x - 15", "It is $2x^2+7x-15$!"),
        (r"3\sqrt{3}", r"we get $3 \sqrt{3}$"),
        (r"3\sqrt{3}", "we get 3√3"),
        ("(5, 5)", "They meet in the point (5,5)."),
        ("y = 2x - 3", r"so $y = 2x-3$"),
        (r"\text{Wednesday}", "The answer is Wednesday."),
    ],
)
def test_what_gives_the_answer_away(answer, message):
    assert gives_away(read_reference(answer), message, "A problem without numbers.")


@pytest.mark.parametrize(
    ("answer", "message", "problem"),
    [
        ("375", "What is 18 times 24?", CINEMA),
        ("375", "There are 3750 of them, or 37.5, or 1375.", CINEMA),
        ("18", "So there are 18 rows. How many roles?", CINEMA),
        ("6", "There are 6 terms. Which ones hold x?", ""),
        ("2", "Divide both sides by 2 and tell me what is left.", ""),
        ("12", "Take a smaller example: 3 · 4 = 12. And yours?", ""),
        ("0", "Bring it to the form x^2 + 3x = 0 first.", ""),
        ("180", "What do you know about the 180 degrees?", ""),
        (r"\frac{1}{2}", r"Multiply by $\frac{1}{2}$ and see.", ""),
        ("3", "Step 3: what is left?", ""),
        (r"\{1, 2\}", "Look at steps 1 and 2 again.", ""),
        ("x^2 - x - 6", "Look at $x^2 - x - 60$ and $2x^2 - x - 6$.", ""),
        (r"\text{no}", "There is no hurry. What now?", ""),
        ("4ab", "What is (a+b)^2?", ""),
    ],
)
def test_what_does_not(answer, message, problem):
    assert gives_away(read_reference(answer), message, problem) == ""


@pytest.mark.parametrize(
    ("answer", "text", "found"),
    [
        ("375", "I get 375.", True),
        ("375", "I get 385.", False),
        ("6", "six?", True),
        (r"\frac{10}{3}", "3.33", True),
        ("(x + 6)(x - 4)", "(x-4)(x+6)", True),
        ("(x + 6)(x - 4)", "(x+5)(x-4)", None),
        (r"\{-2, 7\}", "-2 or 7", True),
        (r"\text{Wednesday}", "a wednesday", True),
    ],
)
def test_what_the_student_has_said(answer, text, found):
    assert has_been_said(read_reference(answer), text) is found


@pytest.mark.parametrize(
    ("said", "answered", "wrong"),
    [
        ([], False, False),
        (["I get 3000."], True, False),
        (["I get 3000.", "No, it makes 4000."], False, True),
        (
            [
                "First 5000 - 2000 = 3000, so he has 4000 left. "
                + "Here is how I came to think so. " * 5
                + "It is 4000."
            ],
            False,
            True,
        ),
        (["First 5000 - 2000 = 3000, so he has 4000 left."], True, False),
        (["I get 3000.", "It was 5000 - 2000 = 3000 and so 1000 are left."], True, False),
        (["I get 3000.", "And with ten more it is 3010."], True, False),
        (["The answer is 3000, because 4000 is too much by 1000."], True, False),
        (["I get 4000.", "Is it 3000?"], True, False),
        (["I get 4000.", "I do not know."], False, True),
        (
            ["He walks 4000 steps before he sits down in the park to rest and look at all of the small ducks."],
            False,
            False,
        ),
        (["That is half of 6000."], False, False),
    ],
)
def test_a_later_result_of_the_student_counts(said, answered, wrong):
    reference = read_reference("3000")
    assert (has_answered(reference, said), gives_wrong_result(reference, said)) == (answered, wrong)


def test_every_shipped_answer_is_found_where_it_is_stated():
    """Found, or else short and of letters alone, which rules leave to a model."""
    for row in ROWS:
        reference = read_reference(row["answer"])
        leak = gives_away(reference, f"So the answer is ${row['answer']}$.", "")
        short = not reference.words and reference.value is None and len(reference.text) < 16
        assert leak or short, row["id"]
        for harmless in ("What have you tried so far?", "Which step comes first? Look at both sides again."):
            assert gives_away(reference, harmless, row["problem"]) == "", row["id"]
