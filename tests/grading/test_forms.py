"""Answers as texts: which part of a solution is its answer, and what is equal without computer algebra."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.grading.forms import compare_as_text, extract_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"So \boxed{4}.", "4"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{}", ""),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a_{b_{c}}}", "a_{b_{c}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.} is {it}", r"\left\{ 1 \right."),
        (r"\boxed{2 \boxed{3}}", "3"),
        (r"\boxed {x}", "x"),
        (r"} \boxed{3} and \boxed{4", "3"),
        (r"\boxed{4", None),
        (r"\boxed 4", None),
        ("boxed{4}", None),
        ("The answer is 4.", None),
        ("", None),
    ],
)
def test_the_last_whole_box_counts(text, content):
    assert extract_boxed(text) == content


@given(st.fractions(max_denominator=1000).filter(lambda f: abs(f) < 10**9))
def test_every_way_of_writing_a_fraction_is_the_same_number(number):
    top, bottom = number.numerator, number.denominator
    for fraction in (f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{top * 3}}}{{{bottom * 3}}}"):
        assert compare_as_text(fraction, f"{top}/{bottom}") is True
        assert compare_as_text(fraction, f"{top + 1}/{bottom}") is not True
    if bottom == 1:
        assert compare_as_text(f"{top:,}", str(Fraction(top))) is True


@given(st.text(), st.text())
def test_no_text_makes_the_reading_of_it_fail(solution, answer):
    assert compare_as_text(solution, answer) in (True, False) or compare_as_text(solution, answer)
    assert compare_as_text(solution, solution) in (True, False)
