"""Splitting messages into what was thought and what was said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.rollout.thoughts import ABSENT, CLOSED, CUT, OPENED, SplitMessage, split_message, visible_text


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("Hello.", False, SplitMessage("Hello.", None, ABSENT)),
        ("", False, SplitMessage("", None, ABSENT)),
        ("<think>two plus two</think>\n\nFour.", False, SplitMessage("Four.", "two plus two", CLOSED)),
        ("<think></think>Four.", False, SplitMessage("Four.", "", CLOSED)),
        ("two plus two</think>Four.", True, SplitMessage("Four.", "two plus two", OPENED)),
        ("two plus two</think>Four.", False, SplitMessage("Four.", "two plus two", OPENED)),
        ("the answer is four", True, SplitMessage("", "the answer is four", CUT)),
        ("", True, SplitMessage("", "", CUT)),
        ("<think>the answer is four", False, SplitMessage("", "the answer is four", CUT)),
        ("Well. <think>the answer is four", False, SplitMessage("Well.", "the answer is four", CUT)),
        ("<think>a</think>b<think>c</think>d", False, SplitMessage("bd", "a\nc", CLOSED)),
        ("<think>a</think>b<think>c", False, SplitMessage("b", "a\nc", CUT)),
        ("a</think>b<think>c", True, SplitMessage("b", "a\nc", CUT)),
    ],
)
def test_each_state_is_told_from_the_others(text: str, opened: bool, expected: SplitMessage) -> None:
    assert split_message(text, opened) == expected


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "a", "b c", "\n", "1"]), max_size=8).map("".join)


@given(PIECES, st.booleans())
def test_a_thought_that_was_never_closed_is_no_answer(text: str, opened: bool) -> None:
    split = split_message(text, opened)
    assert "<think>" not in split.content and "</think>" not in split.content
    assert (split.thought is None) == (split.state == ABSENT)
    if opened and "</think>" not in text:
        assert (split.content, split.state) == ("", CUT)
    if not opened:
        assert split.content == visible_text(text)


@given(PIECES)
def test_the_state_is_cut_exactly_if_a_tag_stays_open(text: str) -> None:
    depth = 0
    for character in text.replace("</think>", "\0").replace("<think>", "\1"):
        depth = 0 if character == "\0" else 1 if character == "\1" else depth
    assert (split_message(text).state == CUT) == bool(depth)


PARTS = st.lists(st.tuples(st.booleans(), st.text(alphabet="ab \n", max_size=4)))


@given(parts=PARTS, opened_in_prompt=st.none() | st.text("xy"), left_open=st.none() | st.text("xy"))
def test_what_is_said_is_heard_and_what_is_thought_is_not(parts, opened_in_prompt, left_open):
    text = "".join(f"<think>{words}</think>" if is_thought else words for is_thought, words in parts)
    expected = "".join(words for is_thought, words in parts if not is_thought)
    before = "" if opened_in_prompt is None else f"{opened_in_prompt}</think>"
    after = "" if left_open is None else f"<think>{left_open}"
    assert visible_text(before + text + after) == expected.strip()


@given(st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "x"])))
def test_no_tag_is_ever_heard(parts):
    visible = visible_text("".join(parts))
    assert "<think>" not in visible
    assert "</think>" not in visible
