"""The quickstart's lessons: how they are split, written and read back."""

from collections import Counter

import pytest

from classroom_rl.environments.toy_language.grammar import TOPICS
from classroom_rl.environments.toy_language.lessons import (
    HELD_OUT,
    LESSONS,
    make_lessons,
    parse_problem,
    render_problem,
)
from classroom_rl.errors import DataError

PLAN = "Lesson: food, boil, yesterday\nPlan: you, sister"


def test_lessons_are_split_without_overlap_and_by_seed_alone():
    train, heldout = make_lessons(42)
    assert (len(train) + len(heldout), len(heldout)) == (LESSONS, HELD_OUT) == (576, 116)
    assert len({render_problem(lesson) for lesson in train + heldout}) == LESSONS
    assert Counter(lesson.topic for lesson in train + heldout) == dict.fromkeys(TOPICS, 72)
    assert make_lessons(42) == (train, heldout) != make_lessons(43)


def test_problems_are_read_back():
    for lesson in make_lessons(7)[0]:
        assert parse_problem(render_problem(lesson)) == lesson


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Solve x + 1 = 2.",
        "Lesson: food",
        PLAN.replace("boil", "play"),
        PLAN.replace("sister", "dog"),
        f"{PLAN}\nHi!",
    ],
)
def test_other_problems_are_refused(text):
    with pytest.raises(DataError, match="not a lesson"):
        parse_problem(text)
