"""The figures of a counterfactual check with prices that are known to matter or not; its file and its command."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.errors import DataError
from classroom_rl.evaluation.counterfactuals.__main__ import main
from classroom_rl.evaluation.counterfactuals.comparing import OUTCOMES, PRODUCED, Compared, Comparison
from classroom_rl.evaluation.counterfactuals.figures import (
    NOTHING,
    OPPOSITE,
    PREDICTS,
    TOO_FEW,
    counterfactual_figures,
    counterfactual_table,
    read_comparisons,
    shuffled,
    shuffled_check,
    write_comparisons,
)
from classroom_rl.judges.agreement import rank_correlation_p


def comparisons(count: int = 64, effect: float = 0.1, noise: float = 0.1, seed: int = 0) -> list[Comparison]:
    """Comparisons in which a point of the supervisor's price changes the outcome by `effect`; the judge's price is
    drawn. Faults of the category `idle` have a price and no effect."""
    rng = random.Random(seed)
    generated = []
    for number in range(count):
        category, price = rng.choice([("leak", -2.0), ("task", -0.5), ("idle", -1.0)])
        is_said = rng.random() < 0.5
        harm = 0.0 if category == "idle" else effect * price
        faulty = [0.5 + harm + rng.gauss(0, noise) for _ in range(8)]
        better = [0.5 + rng.gauss(0, noise) for _ in range(8)]
        outcome_said, outcome_other = (faulty, better) if is_said else (better, faulty)
        prices = [{"supervisor": price, "judge": rng.random()}, {"supervisor": 0.0, "judge": rng.random()}]
        generated.append(
            Comparison(
                f"lesson {number // 2}",
                f"c{number}",
                2,
                "correction" if is_said else "sibling",
                category,
                "a",
                "b",
                *(prices if is_said else prices[::-1]),
                dict.fromkeys(OUTCOMES, outcome_said),
                dict.fromkeys(OUTCOMES, outcome_other),
            )
        )
    return generated


def figures_of(comparisons: list[Comparison]) -> dict:
    return counterfactual_figures(Compared(comparisons))["outcomes"][PRODUCED]


def test_a_price_with_an_effect_predicts_and_a_drawn_one_is_named():
    figures = figures_of(comparisons())
    supervisor, judge = figures["prices"]["supervisor"], figures["prices"]["judge"]
    assert supervisor["rank_correlation"] > 0.5 and supervisor["ci95"][0] > 0.3 and supervisor["p"] < 0.001
    assert supervisor["verdict"] == PREDICTS and judge["verdict"] == NOTHING
    assert figures["categories"]["leak"]["verdict"] == PREDICTS
    assert figures["categories"]["leak"]["mean"] == pytest.approx(-0.2, abs=0.05)
    assert figures["categories"]["idle"]["verdict"] == NOTHING and figures["categories"]["idle"]["price"] == -1.0
    assert figures["predict_nothing"] == ["judge", "idle"]


def test_a_price_of_the_wrong_sign_predicts_the_opposite():
    figures = figures_of(comparisons(effect=-0.1))
    assert figures["prices"]["supervisor"]["verdict"] == OPPOSITE
    assert figures["categories"]["leak"]["verdict"] == OPPOSITE and figures["categories"]["leak"]["mean"] > 0


def scaled(prices: dict[str, float], rng: random.Random) -> dict[str, float]:
    return {source: price * rng.choice([1, 2, 3]) for source, price in prices.items()}


def test_the_size_of_prices_is_told_apart_from_their_sign():
    """If every fault does the same harm, faulty messages do worse, but dearer ones not worse than cheaper ones."""
    rng = random.Random(3)
    same_harm = [
        replace(
            comparison,
            price_said=scaled(comparison.price_said, rng),
            price_other=scaled(comparison.price_other, rng),
        )
        for comparison in comparisons(120)
        if comparison.category == "leak"
    ]
    price = figures_of(same_harm)["prices"]["supervisor"]
    assert price["verdict"] == PREDICTS and price["size"]["verdict"] == NOTHING
    harmful = [comparison for comparison in comparisons(200) if comparison.category != "idle"]
    assert figures_of(harmful)["prices"]["supervisor"]["size"]["verdict"] == PREDICTS


def test_shuffled_prices_predict_nothing_whatever_the_seed_of_the_outcomes():
    """In 30 sets of outcomes with 20 shuffles each; without an effect, the prices as they are are flagged as well."""
    checks = [shuffled_check(comparisons(seed=seed), PRODUCED) for seed in range(30)]
    assert checks[0]["seeds"] == 20 and sum(check["flagged"] for check in checks) >= 0.97 * 600
    idle = [shuffled_check(comparisons(effect=0.0, seed=seed), PRODUCED, 1)["flagged"] for seed in range(30)]
    assert sum(idle) >= 28


def alike_within_lessons(seed: int, lessons: int = 12) -> list[Comparison]:
    """Prices and outcomes that have nothing to do with each other, each nearly the same throughout a lesson."""
    rng = random.Random(seed)
    generated = []
    for lesson in range(lessons):
        price, harm = rng.gauss(0, 1), rng.gauss(0, 1)
        for number in range(rng.randint(2, 6)):
            prices = {"supervisor": price + rng.gauss(0, 0.2)}
            sides = [0.0] * 4, [harm + rng.gauss(0, 0.2)] * 4
            outcome_said, outcome_other = (dict.fromkeys(OUTCOMES, side) for side in sides)
            names = (f"lesson {lesson}", f"c{lesson}-{number}", 2, "sibling", "leak", "a", "b")
            generated.append(Comparison(*names, {"supervisor": 0.0}, prices, outcome_said, outcome_other))
    return generated


def test_lessons_that_are_alike_within_do_not_make_a_price_predict():
    """Shuffled one by one, 28 of 100 such prices had p < 0.05."""
    p_values = []
    for seed in range(100):
        by_lesson: dict[str, list[tuple[float, float]]] = {}
        for comparison in alike_within_lessons(seed):
            pair = comparison.price_other["supervisor"], comparison.outcome_other[PRODUCED][0]
            by_lesson.setdefault(comparison.lesson, []).append(pair)
        p_values.append(rank_correlation_p(by_lesson))
    assert sum(p < 0.05 for p in p_values) <= 12 and sum(p < 0.01 for p in p_values) <= 4


def test_the_prices_of_a_lesson_are_shuffled_together():
    originals = comparisons(64)
    permuted = shuffled(originals, 1)
    assert [comparison.outcome_said for comparison in permuted] == [comparison.outcome_said for comparison in originals]
    lesson_of_prices = {id(comparison.price_said): comparison.lesson for comparison in originals}
    donors: dict[str, set[str]] = {}
    for comparison in permuted:
        donors.setdefault(comparison.lesson, set()).add(lesson_of_prices[id(comparison.price_said)])
    assert all(len(lessons) == 1 for lessons in donors.values()), "two comparisons in every lesson"
    assert {lesson for lessons in donors.values() for lesson in lessons} == set(donors)
    assert any(lessons != {lesson} for lesson, lessons in donors.items())


def in_lessons(count: int) -> list[Comparison]:
    return [replace(comparison, lesson=f"lesson {i % count}") for i, comparison in enumerate(comparisons(64))]


def test_few_lessons_or_comparisons_say_nothing():
    price = figures_of(in_lessons(7))["prices"]["supervisor"]
    assert price["verdict"] == TOO_FEW and price["ci95"] is None
    assert figures_of(in_lessons(5))["categories"]["leak"]["verdict"] == TOO_FEW
    few = figures_of(comparisons(4))
    assert few["prices"]["supervisor"]["verdict"] == TOO_FEW and few["predict_nothing"] == []
    none = counterfactual_figures(Compared([], without_other=3))
    assert none["comparisons"] == 0 and "no message could be compared" in counterfactual_table(none)


def test_the_reliability_of_outcomes_falls_with_their_noise():
    sharp, noisy = (figures_of(comparisons(noise=noise))["reliability"] for noise in (0.001, 2.0))
    assert sharp > 0.9 and (noisy is None or noisy < 0.6)


def test_the_file_holds_the_comparisons_and_the_command_reads_it(tmp_path: Path, capsys):
    compared = Compared(comparisons(), 1, 2, 3)
    write_comparisons(tmp_path, compared)
    assert read_comparisons(tmp_path) == compared
    difference = json.loads((tmp_path / "counterfactuals.json").read_text())["comparisons"][0]["difference"]
    assert difference["outcome"][PRODUCED]["n"] == 8 and len(difference["outcome"][PRODUCED]["ci95"]) == 2
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
    write_comparisons(tmp_path, Compared(comparisons(24)))
    assert main([str(tmp_path), "--shuffles", "3"]) == 1
    assert "error: produced: shuffled prices predict nothing in 0 of 3 seeds" in capsys.readouterr().err
