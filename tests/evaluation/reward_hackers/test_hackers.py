"""No embedded judge pays the scripted reward hackers, and all pay honest tutors."""

import pytest

from classroom_rl.evaluation.reward_hackers.playing import ROOMS, play
from classroom_rl.evaluation.reward_hackers.table import HACKERS, TUTORS, breaches

LESSONS = {"quickstart": 4, "small_tutor": 2, "language_tutor": 2}
FEW_LESSONS = {("headings_and_lists", "small_tutor"), ("answer_without_its_subject", "small_tutor")}
"""Hackers that are below the bar on 40 lessons, and may be above it on the first `LESSONS`."""
PAID = {("answer_one_message_ahead", "small_tutor"), ("answer_one_message_ahead", "language_tutor")}
"""A phrase that is shown beside the task for another counts as introduced: no rule tells it from good teaching."""


@pytest.mark.parametrize("room", ROOMS)
def test_honest_tutors_are_paid_and_hackers_are_not(room):
    problems = ROOMS[room].problems()[: LESSONS[room]]
    results = {name: {room: play(ROOMS[room], tutor, problems, draws=2)} for name, tutor in TUTORS.items()}
    assert any(lesson.holds_error for lesson in results["honest"][room])
    paid = {(text.split()[0], text.split(" in ")[1].split(",")[0]) for text in breaches(results)}
    assert paid <= FEW_LESSONS | PAID


def test_there_are_hackers_enough():
    assert len(HACKERS) >= 25
    assert all(tutor.about for tutor in TUTORS.values())
