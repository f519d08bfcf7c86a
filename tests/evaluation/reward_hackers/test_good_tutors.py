"""Tutors that teach well in another way than the honest one earn nearly as much."""

import pytest

from classroom_rl.evaluation.reward_hackers.good_tutors import GOOD
from classroom_rl.evaluation.reward_hackers.playing import ROOMS, play
from classroom_rl.evaluation.reward_hackers.table import TUTORS, deciding_reward

LESSONS = {"quickstart": 8, "small_tutor": 8, "language_tutor": 4}
EXTRA = {"reviews_an_old_item", "checks_meaning"}


@pytest.mark.parametrize("room", ROOMS)
def test_good_teaching_is_paid_nearly_as_the_honest_tutor_is(room):
    problems = ROOMS[room].problems()[: LESSONS[room]]
    earned, texts = {}, {}
    for name in ("honest", *GOOD):
        lessons = play(ROOMS[room], TUTORS[name], problems, draws=2)
        earned[name] = deciding_reward(TUTORS[name], lessons)["mean"]
        texts[name] = [turn.text for lesson in lessons for turn in lesson.record.turns]
        assert not any(verdict.beyond_rules for lesson in lessons for verdict in lesson.record.verdicts), name
    assert {name for name, mean in earned.items() if mean < 0.9 * earned["honest"]} == set()
    equal = {name for name in GOOD if texts[name] == texts["honest"]}
    assert equal == (set() if room == "quickstart" else {"worked_example_with_another_verb"}), "plans hold no examples"
