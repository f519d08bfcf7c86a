"""Tests of the figures of a counterfactual check: prices that are known to matter or not, its file, its command."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.errors import DataError
from classroom_rl.evaluation.counterfactuals.__main__ import main
from classroom_rl.evaluation.counterfactuals.comparing import Compared, Comparison
from classroom_rl.evaluation.counterfactuals.figures import (
    NOTHING,
    OPPOSITE,
    PREDICTS,
    TOO_FEW,
    counterfactual_figures,
    shuffled,
    shuffled_check,
)
from classroom_rl.evaluation.counterfactuals.prices import OUTCOMES, PRODUCED
from classroom_rl.evaluation.counterfactuals.table import counterfactual_table, read_comparisons, write_comparisons
from classroom_rl.results.agreement import rank_correlation_p


def comparisons(count: int = 64, effect: float = 0.1, noise: float = 0.1, seed: int = 0) -> list[Comparison]:
    """Comparisons in which a point of the supervisor's price changes the outcome by `effect`; the judge's price is
    drawn. Faults of the category `idle` have a price and no effect."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        category, price = rng.choice([("leak", -2.0), ("task", -0.5), ("idle", -1.0)])
        is_said = rng.random() < 0.5
        harm = 0.0 if category == "idle" else effect * price
        faulty = [0.5 + harm + rng.gauss(0, noise) for _ in range(8)]
        better = [0.5 + rng.gauss(0, noise) for _ in range(8)]
        said, other = (faulty, better) if is_said else (better, faulty)
        prices = [{"supervisor": price, "judge": rng.random()}, {"supervisor": 0.0, "judge": rng.random()}]
        found.append(
            Comparison(
                f"lesson {number // 2}",
                f"c{number}",
                2,
                "correction" if is_said else "sibling",
                category,
                "a",
                "b",
                *(prices if is_said else prices[::-1]),
                dict.fromkeys(OUTCOMES, said),
                dict.fromkeys(OUTCOMES, other),
            )
        )
    return found


def test_a_price_with_an_effect_predicts_and_a_drawn_one_is_named():
    figures = counterfactual_figures(Compared(comparisons()))["outcomes"][PRODUCED]
    supervisor, judge = figures["prices"]["supervisor"], figures["prices"]["judge"]
    assert supervisor["rank_correlation"] > 0.5 and supervisor["ci95"][0] > 0.3 and supervisor["p"] < 0.001
    assert supervisor["verdict"] == PREDICTS and judge["verdict"] == NOTHING
    assert figures["categories"]["leak"]["verdict"] == PREDICTS
    assert figures["categories"]["leak"]["mean"] == pytest.approx(-0.2, abs=0.05)
    assert figures["categories"]["idle"]["verdict"] == NOTHING and figures["categories"]["idle"]["price"] == -1.0
    assert figures["predict_nothing"] == ["judge", "idle"]


def test_a_price_of_the_wrong_sign_predicts_the_opposite():
    figures = counterfactual_figures(Compared(comparisons(effect=-0.1)))["outcomes"][PRODUCED]
    assert figures["prices"]["supervisor"]["verdict"] == OPPOSITE
    assert figures["categories"]["leak"]["verdict"] == OPPOSITE and figures["categories"]["leak"]["mean"] > 0


def test_the_size_of_prices_is_told_apart_from_their_sign():
    """If every fault does the same harm, faulty messages do worse, but dearer ones not worse than cheaper ones."""
    alike = [
        replace(each, price_said={name: value * rng.choice([1, 2, 3]) for name, value in each.price_said.items()},
                price_other={name: value * rng.choice([1, 2, 3]) for name, value in each.price_other.items()})
        for rng in [random.Random(3)] for each in comparisons(count=120) if each.category == "leak"
    ]  # fmt: skip
    found = counterfactual_figures(Compared(alike))["outcomes"][PRODUCED]["prices"]["supervisor"]
    assert found["verdict"] == PREDICTS and found["size"]["verdict"] == NOTHING
    whole = counterfactual_figures(Compared([each for each in comparisons(200) if each.category != "idle"]))
    assert whole["outcomes"][PRODUCED]["prices"]["supervisor"]["size"]["verdict"] == PREDICTS


def test_shuffled_prices_are_found_to_predict_nothing_in_19_of_20_seeds():
    found = comparisons()
    assert shuffled_check(found, PRODUCED)["flagged"] >= 19 and shuffled_check(found, PRODUCED)["seeds"] == 20
    one = shuffled(found, 0)
    assert sorted(each.price_said["supervisor"] for each in one + found[:0]) == sorted(
        each.price_said["supervisor"] for each in found
    )
    assert [each.outcome_said for each in one] == [each.outcome_said for each in found]
    assert [each.price_said for each in one] != [each.price_said for each in found]


def test_shuffled_prices_are_flagged_whatever_the_seed_of_the_outcomes():
    """In 30 sets of outcomes with 20 shuffles each; without an effect, the prices as they are are flagged as well."""
    flagged = [shuffled_check(comparisons(seed=seed), PRODUCED)["flagged"] for seed in range(30)]
    assert sum(flagged) >= 0.97 * 600
    idle = [comparisons(effect=0.0, seed=seed) for seed in range(30)]
    verdicts = [shuffled_check(each, PRODUCED, 1)["flagged"] for each in idle]
    assert sum(verdicts) >= 28


def alike_within_lessons(seed: int, lessons: int = 12) -> list[Comparison]:
    """Prices and outcomes that have nothing to do with each other, each nearly the same throughout a lesson."""
    rng = random.Random(seed)
    found = []
    for lesson in range(lessons):
        price, harm = rng.gauss(0, 1), rng.gauss(0, 1)
        for place in range(rng.randint(2, 6)):
            prices = {"supervisor": price + rng.gauss(0, 0.2)}
            sides = [0.0] * 4, [harm + rng.gauss(0, 0.2)] * 4
            said, other = (dict.fromkeys(OUTCOMES, side) for side in sides)
            names = (f"lesson {lesson}", f"c{lesson}-{place}", 2, "sibling", "leak", "a", "b")
            found.append(Comparison(*names, {"supervisor": 0.0}, prices, said, other))
    return found


def test_lessons_that_are_alike_within_do_not_make_a_price_predict():
    """Shuffled one by one, 28 of 100 such prices had p < 0.05."""
    prices = [{each.lesson: [] for each in found} for found in (alike_within_lessons(seed) for seed in range(100))]
    for seed, by_lesson in enumerate(prices):
        for each in alike_within_lessons(seed):
            pair = each.price_other["supervisor"], each.outcome_other[PRODUCED][0]
            by_lesson[each.lesson].append(pair)
    found = [rank_correlation_p(by_lesson) for by_lesson in prices]
    assert sum(p < 0.05 for p in found) <= 12 and sum(p < 0.01 for p in found) <= 4


def test_the_prices_of_a_lesson_are_shuffled_together():
    found = comparisons(64)
    moved = shuffled(found, 1)
    by_lesson: dict[str, set[str]] = {}
    origin = {id(each.price_said): each.lesson for each in found}
    for each in moved:
        by_lesson.setdefault(each.lesson, set()).add(origin[id(each.price_said)])
    assert all(len(lessons) == 1 for lessons in by_lesson.values()), "two comparisons in every lesson"


def test_fewer_than_eight_lessons_say_nothing_of_a_price():
    few = [replace(each, lesson=f"lesson {place % 7}") for place, each in enumerate(comparisons(64))]
    figures = counterfactual_figures(Compared(few))["outcomes"][PRODUCED]
    assert figures["prices"]["supervisor"]["verdict"] == TOO_FEW and figures["prices"]["supervisor"]["ci95"] is None
    five = [replace(each, lesson=f"lesson {place % 5}") for place, each in enumerate(comparisons(64))]
    figures = counterfactual_figures(Compared(five))["outcomes"][PRODUCED]
    assert figures["categories"]["leak"]["verdict"] == TOO_FEW


def test_the_outcomes_repeat_as_far_as_they_are_no_noise():
    sharp = counterfactual_figures(Compared(comparisons(noise=0.001)))["outcomes"][PRODUCED]["reliability"]
    noisy = counterfactual_figures(Compared(comparisons(noise=2.0)))["outcomes"][PRODUCED]["reliability"]
    assert sharp > 0.9 and (noisy is None or noisy < 0.6)


def test_a_few_comparisons_say_nothing_and_none_is_told():
    few = counterfactual_figures(Compared(comparisons(4)))["outcomes"][PRODUCED]
    assert few["prices"]["supervisor"]["verdict"] == TOO_FEW and few["predict_nothing"] == []
    none = counterfactual_figures(Compared([], without_other=3))
    assert none["comparisons"] == 0 and "no message could be compared" in counterfactual_table(none)


def test_the_file_holds_the_comparisons_and_the_command_reads_it(tmp_path: Path, capsys):
    compared = Compared(comparisons(), 1, 2, 3)
    write_comparisons(tmp_path, compared)
    assert read_comparisons(tmp_path) == compared
    shown = json.loads((tmp_path / "counterfactuals.json").read_text())["comparisons"][0]["difference"]
    assert shown["outcome"][PRODUCED]["n"] == 8 and len(shown["outcome"][PRODUCED]["ci95"]) == 2
    assert main([str(tmp_path), "--shuffles", "40"]) == 0
    printed = capsys.readouterr().out
    assert "Predict nothing: judge, idle." in printed
    flagged = re.search(r"produced: shuffled prices predict nothing in (\d+) of 40 seeds", printed)
    assert int(flagged[1]) >= 38


def test_a_folder_without_a_check_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"There is no .*counterfactuals\.json: eval\.py writes it"):
        main([str(tmp_path)])
    (tmp_path / "counterfactuals.json").write_text('{"comparisons": [{}]}')
    with pytest.raises(DataError, match="is damaged"):
        main([str(tmp_path)])


def test_a_check_that_calls_shuffled_prices_good_ends_with_an_error(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("classroom_rl.evaluation.counterfactuals.figures.LEVEL", 1.1)
    monkeypatch.setattr("classroom_rl.evaluation.counterfactuals.figures._verdict", lambda *_: PREDICTS)
    write_comparisons(tmp_path, Compared(comparisons()))
    assert main([str(tmp_path), "--shuffles", "3"]) == 1
    assert "error: produced: shuffled prices predict nothing in 0 of 3 seeds" in capsys.readouterr().err
