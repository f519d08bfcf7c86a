"""The lessons that a report shows, chosen by fixed rules."""

import random

import pytest

from classroom_rl.environments.toy_language.grammar import Slip
from classroom_rl.environments.toy_language.scripts import ideal
from classroom_rl.evaluation.report.examples import choose_pairs, describe_slip
from tests.evaluation.report.conftest import conversations
from tests.support.scripted_teachers import ignores_errors
from tests.support.synthetic_run import record_of, scored


def test_lessons_are_chosen_by_the_change_of_their_reward():
    before = [record_of(f"lesson {i}", [], [scored(1, 1, 10)], reward=0.5) for i in range(9)]
    rewards = [0.9, 0.5, 0.6, 0.4, 0.7, 0.55, 0.1, 0.8, 0.65]
    after = [record_of(f"lesson {i}", [], [scored(1, 1, 10)], reward=reward) for i, reward in enumerate(rewards)]
    after[4] = after[4].model_copy(update={"rejected": True})
    before[3] = before[3].model_copy(update={"reward": None})
    chosen = [(pair.label, pair.title) for pair in choose_pairs(before, after)]
    # Ranked: 0 (+.4) 7 (+.3) 4 8 [2] 5 1 6 (−.4); 3 has no change, for it had no verdict before.
    assert chosen[:4] == [
        ("most gained", "lesson 0"),
        ("most gained", "lesson 7"),
        ("median", "lesson 2"),
        ("least gained", "lesson 6"),
    ]
    assert chosen[4] == ("least gained", "lesson 1")
    assert set(chosen[5:]) == {("rejected or without a verdict", f"lesson {i}") for i in (3, 4)}


def test_a_lesson_is_shown_once_and_equal_changes_have_an_order():
    sides = [conversations(ignores_errors), conversations(ideal)]
    chosen = choose_pairs(*sides)
    assert len({pair.after.problem_id for pair in chosen}) == len(chosen)
    shuffled = [random.Random(3).sample(side, len(side)) for side in sides]
    shuffled = [sorted(side, key=lambda record: record.id) for side in shuffled]
    assert [pair.after.id for pair in choose_pairs(*shuffled)] == [pair.after.id for pair in chosen]


def test_with_one_side_the_rewards_themselves_rank():
    after = [record_of(f"lesson {i}", [], [scored(1, 1, 1)], reward=i / 10) for i in range(6)]
    chosen = choose_pairs([], after)
    assert [(pair.label, pair.title) for pair in chosen][:3] == [
        ("highest reward", "lesson 5"),
        ("highest reward", "lesson 4"),
        ("median", "lesson 2"),
    ]
    assert choose_pairs([], []) == []


@pytest.mark.parametrize(
    ("slip", "text"),
    [(Slip("tense", "go", "went"), "tense: go → went"), (Slip("article", "egg", "an"), "article: an egg")],
)
def test_slips_in_words(slip: Slip, text: str):
    assert describe_slip(slip) == text
