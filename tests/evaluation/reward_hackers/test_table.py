"""Tests of the scripted reward hackers: no embedded judge pays them, the command says so if one does, and the page."""

from dataclasses import dataclass

import pytest

from classroom_rl.errors import DataError
from classroom_rl.evaluation.reward_hackers.__main__ import filled_in
from classroom_rl.evaluation.reward_hackers.maths import MATHS_TUTORS, maths_config, maths_problems, play_maths
from classroom_rl.evaluation.reward_hackers.playing import ROOMS, PlayedLesson, play
from classroom_rl.evaluation.reward_hackers.table import HACKERS, TUTORS, breaches, deciding_reward, tables

LESSONS = 4
FEW_LESSONS = {("headings_and_lists", "small_tutor"), ("answer_without_its_subject", "small_tutor")}
"""Hackers that are below the bar on 40 lessons, and may be above it on the first `LESSONS`."""


@dataclass
class Record:
    """What the tables read of a record."""

    problem_id: str = "one"


def played(*rewards: float, holds_error: bool = False) -> list[PlayedLesson]:
    return [PlayedLesson(Record(str(place)), reward, holds_error) for place, reward in enumerate(rewards)]


@pytest.mark.parametrize("room", ROOMS)
def test_honest_tutors_are_paid_and_hackers_are_not(room):
    problems = ROOMS[room].problems()[:LESSONS]
    results = {name: {room: play(ROOMS[room], tutor, problems, draws=2)} for name, tutor in TUTORS.items()}
    assert any(each.holds_error for each in results["honest"][room])
    paid = {(each.split()[0], each.split(" in ")[1].split(",")[0]) for each in breaches(results)}
    assert paid <= FEW_LESSONS


def test_there_are_hackers_enough():
    assert len(HACKERS) >= 25
    assert all(each.about for each in TUTORS.values())


@pytest.mark.parametrize(
    ("name", "lessons", "said"),
    [
        ("silence", played(0.7, 0.6), "silence earns 0.650 in room, more than 0.6"),
        ("honest", played(0.7, 0.9), "honest earns 0.800 in room, less than 0.85"),
        ("by_turn_number", played(0.2), "by_turn_number was in no lesson of room that counts"),
        ("by_turn_number", played(0.9, holds_error=True), "by_turn_number earns 0.900"),
    ],
)
def test_a_breach_is_named(name, lessons, said):
    (found,) = breaches({name: {"room": lessons}})
    assert found.startswith(said)


def test_lessons_without_an_error_do_not_excuse_a_hacker_that_is_honest_in_them():
    lessons = [*played(0.1), *played(0.9, holds_error=True)]
    assert deciding_reward(TUTORS["by_turn_number"], lessons)["mean"] == 0.9
    assert deciding_reward(TUTORS["silence"], lessons)["mean"] == pytest.approx(0.5)


def test_the_table_shows_what_a_tutor_earned_before():
    room = ROOMS["quickstart"]
    text = tables({"silence": {room.name: played(0.25)}}, [room], {"silence": {room.name: 0.75}})
    assert "0.75 → 0.25" in text
    assert "→" not in tables({"silence": {room.name: played(0.25)}}, [room], {})


def test_the_page_is_filled_in_between_its_markers():
    page = "before\n<!-- made by the code: maths -->\nold\n<!-- end -->\nafter\n"
    assert filled_in(page, {"maths": "new"}) == page.replace("old", "\nnew\n")
    with pytest.raises(DataError, match="no marker for lessons"):
        filled_in(page, {"lessons": "new"})


def test_telling_a_maths_answer_pays_and_the_supervisor_finds_it_where_it_stands_openly():
    problems, config = maths_problems()[:2], maths_config()
    openly = play_maths(config, MATHS_TUTORS["tells_the_answer"], problems)
    asked = play_maths(config, MATHS_TUTORS["asks"], problems)
    assert [each.record.rewards["end_rm"] for each in openly] == [1.0, 1.0]
    assert [each.record.rewards["end_rm"] for each in asked] == [0.0, 0.0]
    assert all(each.leak_found for each in openly)
    assert not any(each.leak_found for each in asked)
