"""Tests of intervals: numbers worked out by hand or published, and the coverage of simulated lessons with fixed seeds.

benchmarks/intervals.py has the families, the other methods that were tried, and larger simulations.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.intervals import DIFFERENCES, VALUES, Draw, _chosen, _without_bounds, coverage, exact, learned
from classroom_rl.rollout import intervals
from classroom_rl.rollout.intervals import (
    LEAST_FOR_CORRELATIONS,
    LEAST_LESSONS,
    interval_of_statistic,
    mean_with_ci,
    share_interval,
    shown,
    student_t,
)


@pytest.fixture
def quick(monkeypatch) -> None:
    """A tenth of the resamples, which are as good for a simulation."""
    monkeypatch.setattr(intervals, "RESAMPLES", 1_000)
    monkeypatch.setattr(intervals, "_FEWEST", 1_000)


def by_lesson(values) -> dict[str, list[float]]:
    return {str(index): [float(value)] for index, value in enumerate(values)}


# By hand -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (5, 2.5706), (11, 2.2010), (29, 2.0452), (115, 1.9808)])
def test_student_s_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, abs=2e-2 if freedom == 1 else 1e-4)


def test_values_that_lie_evenly_have_student_s_interval_if_no_bound_is_known() -> None:
    values = [11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    low, high = mean_with_ci(by_lesson(values))["ci95"]
    half_width = student_t(6) * np.std(values, ddof=1) / math.sqrt(7)
    assert low <= 14 - half_width + 1e-9 and high >= 14 + half_width - 1e-9 and high - low < 2.5 * half_width


def test_fewer_than_six_lessons_have_no_interval() -> None:
    assert mean_with_ci(by_lesson([0.0, 1.0, 0.5, 0.2, 0.9]))["ci95"] is None
    assert mean_with_ci(by_lesson([0.0, 1.0, 0.5, 0.2, 0.9, 0.3]))["ci95"] is not None
    assert share_interval(2, LEAST_LESSONS - 1) is None and share_interval(0, 0) is None


def test_equal_lessons_have_an_interval_only_where_bounds_say_what_may_come() -> None:
    """Six lessons at 1 may be followed by one at 0. If nothing is known of what may come, there is no interval."""
    low, high = mean_with_ci(by_lesson([1.0] * 6))["ci95"]
    assert high == 1 and 0.55 < low < 0.7
    assert mean_with_ci(by_lesson([7.0] * 6)) == {"mean": 7.0, "ci95": None, "n": 6}
    assert mean_with_ci(by_lesson([7.0] * 6), (0.0, 10.0))["ci95"][0] < 7


def test_a_share_without_a_hit_is_not_known_to_be_zero() -> None:
    """Clopper and Pearson have [0, 0.168] for 0 of 20, and the percentile bootstrap [0, 0]."""
    low, high = share_interval(0, 20)
    assert low == 0 and 0.12 < high < 0.168


def test_the_order_of_lessons_does_not_matter_and_their_conversations_are_one_draw() -> None:
    rng = np.random.default_rng(1)
    values = {str(i): list(rng.random(3)) for i in range(20)}
    estimate, other = mean_with_ci(values), mean_with_ci(dict(reversed(values.items())))
    assert estimate["ci95"] == pytest.approx(other["ci95"], abs=1e-12)
    one = mean_with_ci({name: [conversations[0]] for name, conversations in values.items()})["ci95"]
    repeated = mean_with_ci({name: [conversations[0]] * 50 for name, conversations in values.items()})
    assert repeated["n"] == 1000 and repeated["ci95"] == pytest.approx(one)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.98, 1.0]), min_size=6, max_size=40))
def test_an_interval_holds_the_mean_and_stays_within_the_bounds(values: list[float]) -> None:
    estimate = mean_with_ci(by_lesson(values))
    low, high = estimate["ci95"]
    assert 0 <= low <= estimate["mean"] + 1e-9 and estimate["mean"] - 1e-9 <= high <= 1
    mirrored = mean_with_ci(by_lesson([1 - value for value in values]))["ci95"]
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=0.03)


def test_very_many_lessons_are_drawn_in_fewer_resamples() -> None:
    low, high = mean_with_ci(by_lesson(np.linspace(0, 1, 3_000)))["ci95"]
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(1 / 12 / 3_000), rel=0.1)


def test_an_estimate_without_an_interval_is_printed_with_its_n() -> None:
    assert shown({"mean": 0.5, "ci95": None, "n": 4}) == "0.500 (n = 4)"
    assert shown({"mean": 0.5, "ci95": [0.25, 0.75], "n": 40}, "+", 2) == "+0.50 [+0.25, +0.75]"
    assert shown({"mean": None, "ci95": None, "n": 0}) == "–"


def test_other_figures_have_the_wider_ends_of_bootstrap_and_jackknife() -> None:
    leave_one_out = [0.5 + 0.01 * (-1) ** index for index in range(10)]
    spread = math.sqrt(9 / 10 * 10 * 0.01**2)
    interval = interval_of_statistic(0.5, [0.48] * 50 + [0.9] * 50, leave_one_out, LEAST_FOR_CORRELATIONS)
    assert interval == pytest.approx([0.5 - student_t(9) * spread, 0.9])
    assert interval_of_statistic(0.5, [0.4, 0.6], leave_one_out) is None, "a kappa of ten lessons"


# Coverage ------------------------------------------------------------------------------------------------------------

SIMULATIONS = 200
FEWEST = 0.93 - 2 * math.sqrt(0.93 * 0.07 / SIMULATIONS)
"""What chance leaves of 93 % in so many simulations, two standard errors below."""


@pytest.mark.parametrize("lessons", [6, 12, 30, 116])
@pytest.mark.parametrize("family", [*VALUES, *DIFFERENCES])
def test_an_interval_that_is_printed_covers(family: str, lessons: int, quick: None) -> None:
    values = family in VALUES
    draw, mean = (VALUES if values else DIFFERENCES)[family]
    covered, printed, _ = coverage(draw, mean, (0.0, 1.0) if values else (-1.0, 1.0), _chosen, lessons, SIMULATIONS)
    assert printed == 1 and covered >= FEWEST


@pytest.mark.parametrize("lessons", [6, 30])
@pytest.mark.parametrize("family", VALUES)
def test_without_bounds_an_interval_covers_where_there_is_one(family: str, lessons: int, quick: None) -> None:
    covered, printed, _ = coverage(*VALUES[family], (0.0, 1.0), _without_bounds, lessons, SIMULATIONS)
    assert printed < 0.3 or covered >= FEWEST


@pytest.mark.parametrize("lessons", [2, 3, 5])
@pytest.mark.parametrize("family", VALUES)
def test_with_two_to_five_lessons_nothing_is_printed(family: str, lessons: int) -> None:
    assert coverage(*VALUES[family], (0.0, 1.0), _chosen, lessons, 5)[1] == 0


def test_shares_are_covered_at_every_number_of_lessons() -> None:
    """From the binomial distribution, without simulation: at least 93 % at all of 6 to 20 lessons."""
    for line in exact(shares=(0.05, 0.1, 0.2, 0.5), most=20).splitlines()[1:]:
        assert float(line.split()[4]) >= 0.93, line


# Verdicts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lessons", [2, 4, 5, 6, 12, 30, 116])
@pytest.mark.parametrize("family", ["ceiling", "trained", "rare", "untrained"])
def test_equal_policies_rarely_learned(family: str, lessons: int, quick: None) -> None:
    """Before: 26 % with two lessons, 10 % with four."""
    now, _ = learned(VALUES[family][0], 0.0, lessons, 100)
    assert now == 0 if lessons < LEAST_LESSONS else now <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 100)


@pytest.mark.parametrize("rise", [0.05, 0.1])
def test_at_116_lessons_a_rise_is_found_as_often_as_before(rise: float, quick: None, monkeypatch) -> None:
    monkeypatch.setattr(intervals, "_FEWEST", 2_000)  # as many as the rule before has: fewer find less
    draw: Draw = VALUES["untrained"][0]
    now, before = learned(draw, rise, 116, 100)
    assert now >= before - 0.04 and before > 0.2
