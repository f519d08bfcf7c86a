"""The page of a comparison."""

from classroom_rl.evaluation.report.comparison import choose_lessons
from tests.support.synthetic_run import record_of


def test_lessons_to_show_are_chosen_by_the_spread_of_rewards():
    by_tutor = {
        "a": [record_of(str(i), [], index=i, reward=0.0) for i in range(7)],
        "b": [record_of(str(i), [], index=i, reward=i / 10) for i in range(7)],
    }
    chosen = [group["a"].problem for group in choose_lessons(by_tutor)]
    assert chosen == ["6", "5", "4", "3", "0"]  # furthest apart, the median, closest
    assert choose_lessons({"a": [record_of("x", [], reward=None)]})[0]["a"].reward is None
