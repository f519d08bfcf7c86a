"""Texts that can be stored and compared, and fields that are left out when they are empty."""

from dataclasses import dataclass

import pytest
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from classroom_rl.rollout.text import (
    has_surrogates,
    left_out_when_empty,
    nests_deeper,
    normal,
    without_invisible,
    without_surrogates,
)


@pytest.mark.parametrize(("text", "clean"), [("a\ud800b", "a\ufffdb"), ("é漢🙂", "é漢🙂"), ("", "")])
def test_half_a_character_is_replaced(text: str, clean: str) -> None:
    assert without_surrogates(text) == clean and has_surrogates(text) == (text != clean)


@pytest.mark.parametrize(("value", "levels"), [(3, 0), ([], 0), ([1], 1), ({"a": [1]}, 2), ([[], {"a": {}}], 2)])
def test_levels_of_lists_and_objects_are_counted(value: object, levels: int) -> None:
    assert not nests_deeper(value, levels) and (levels == 0 or nests_deeper(value, levels - 1))


@pytest.mark.parametrize(
    ("text", "compared"),
    [
        ("Dat was het, hè?", "dat was het hè"),
        ("so\u00adft  _hy\u200bphen_", "soft hyphen"),
        ("ﬁve ２", "five 2"),
        ("水を 一つ。", "水を一つ"),
        ("ที่นี่", "ที่นี่"),
    ],
)
def test_phrases_are_compared_by_their_letters(text: str, compared: str) -> None:
    assert normal(text) == compared


def test_invisible_characters_are_left_out() -> None:
    assert without_invisible("a\u200bb\u3164c\ufe0fd") == "abcd" and without_invisible("plain") == "plain"


@left_out_when_empty("extra")
@dataclass(frozen=True)
class Thing:
    name: str = ""
    extra: tuple[int, ...] = ()


@pytest.mark.parametrize(("thing", "written"), [(Thing(), {"name": ""}), (Thing("", (0,)), {"name": "", "extra": [0]})])
def test_only_the_named_fields_are_left_out_when_empty(thing: Thing, written: dict) -> None:
    assert to_jsonable_python([thing]) == [written]
    assert TypeAdapter(Thing).validate_python(written) == thing
