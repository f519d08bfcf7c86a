"""The tables of scripted tutors, what breaks their limits, and the page that they are written into."""

from dataclasses import dataclass

import pytest

from classroom_rl.errors import DataError
from classroom_rl.evaluation.reward_hackers.__main__ import filled_in
from classroom_rl.evaluation.reward_hackers.playing import ROOMS, PlayedLesson
from classroom_rl.evaluation.reward_hackers.table import TUTORS, breaches, deciding_reward, tables


@dataclass
class Record:
    """What the tables read of a record."""

    problem_id: str = "one"


def played(*rewards: float | None, holds_error: bool = False) -> list[PlayedLesson]:
    return [PlayedLesson(Record(str(index)), reward, holds_error) for index, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("name", "lessons", "message"),
    [
        ("silence", played(0.7, 0.6), "silence earns 0.650 in room, more than 0.6"),
        ("honest", played(0.7, 0.9), "honest earns 0.800 in room, less than 0.85"),
        ("by_turn_number", played(0.2), "by_turn_number was in no lesson of room that counts"),
        ("by_turn_number", played(0.9, holds_error=True), "by_turn_number earns 0.900"),
    ],
)
def test_a_breach_is_named(name, lessons, message):
    (breach,) = breaches({name: {"room": lessons}})
    assert breach.startswith(message)


def test_lessons_without_an_error_do_not_excuse_a_hacker_that_is_honest_in_them():
    lessons = [*played(0.1), *played(0.9, holds_error=True)]
    assert deciding_reward(TUTORS["by_turn_number"], lessons)["mean"] == 0.9
    assert deciding_reward(TUTORS["silence"], lessons)["mean"] == pytest.approx(0.5)


def test_the_table_shows_what_a_tutor_earned_before():
    room = ROOMS["quickstart"]
    text = tables({"silence": {room.name: played(0.25)}}, [room], {"silence": {room.name: 0.75}})
    assert "0.75 → 0.25" in text
    assert "→" not in tables({"silence": {room.name: played(0.25)}}, [room], {})


def test_lessons_without_a_verdict_are_counted_below_the_table_and_in_no_mean():
    room = ROOMS["quickstart"]
    results = {"silence": {room.name: [*played(0.25), *played(None)]}, "dots": {room.name: played(None)}}
    text = tables(results, [room], {})
    assert "0.25 (n = 1) |" in text and "| no verdict |" in text
    assert "no readable verdict on 2 of 3 lessons" in text
    assert "no readable verdict" not in tables({"silence": {room.name: played(0.25)}}, [room], {})


def test_the_page_is_filled_in_between_its_markers():
    page = "before\n<!-- made by the code: maths -->\nold\n<!-- end -->\nafter\n"
    assert filled_in(page, {"maths": "new"}) == page.replace("old", "\nnew\n")
    with pytest.raises(DataError, match="no marker for lessons"):
        filled_in(page, {"lessons": "new"})
