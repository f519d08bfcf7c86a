"""Grading of boxed answers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.answers import extract_boxed, is_correct


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"So \boxed{4}.", "4"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x}", "x"),
        (r"\boxed{}", ""),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{4", None),
        ("boxed{4}", None),
        ("The answer is 4.", None),
        ("", None),
    ],
)
def test_the_last_whole_box_counts(text, content):
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    ("boxed", "reference"),
    [
        ("4", "4"),
        ("4.0", "4"),
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac{1}{2}", "1/2"),
        ("2/4", "1/2"),
        (r"\frac{-3}{4}", "-0.75"),
        (r"-\frac{3}{4}", "-3/4"),
        (".5", "0.5"),
        ("1,234", "1234"),
        ("12,345,678.5", "12345678.50"),
        ("+7", "7"),
        ("$ 5 $", "5."),
        (r"x + 1", "x+1"),
        (r"\left(1, 2\right)", "(1,2)"),
        ("5", r"The answer is \boxed{5}"),
    ],
)
def test_equal_answers_are_right_both_ways_round(boxed, reference):
    assert is_correct(rf"Hence \boxed{{{boxed}}}", reference)
    if "boxed" not in reference:
        assert is_correct(rf"Hence \boxed{{{reference}}}", boxed)


@pytest.mark.parametrize(
    ("boxed", "reference"),
    [
        ("5", "4"),
        ("-4", "4"),
        ("0.33", "1/3"),
        ("12", "1,2"),
        ("1,2", "12"),
        ("1,23", "123"),
        ("x", "4"),
        ("1/0", "0"),
        ("(1,2)", "(2,1)"),
        ("", "0"),
    ],
)
def test_other_answers_are_wrong_both_ways_round(boxed, reference):
    assert not is_correct(rf"\boxed{{{boxed}}}", reference)
    assert not is_correct(rf"\boxed{{{reference}}}", boxed)


def test_an_answer_that_is_not_boxed_is_wrong():
    assert not is_correct("4", "4")


@given(st.fractions(max_denominator=1000).filter(lambda f: abs(f) < 10**9))
def test_every_way_of_writing_a_fraction_is_the_same_number(number):
    top, bottom = number.numerator, number.denominator
    for written in (f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{top * 3}}}{{{bottom * 3}}}"):
        assert is_correct(rf"\boxed{{{written}}}", f"{top}/{bottom}")
        assert not is_correct(rf"\boxed{{{written}}}", f"{top + 1}/{bottom}")
    if bottom == 1:
        assert is_correct(rf"\boxed{{{top:,}}}", str(Fraction(top)))


@given(st.text(), st.text())
def test_no_text_makes_it_fail(solution, answer):
    assert is_correct(solution, answer) in (True, False)
    assert is_correct(rf"\boxed{{{solution}}}", answer) in (True, False)
