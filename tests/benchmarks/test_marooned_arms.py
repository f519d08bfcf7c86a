"""The benchmark of the island game trains what it says, and its report compares arms island by island."""

from pathlib import Path

from benchmarks.marooned_arms import FIGURES, MaroonedBench, report
from classroom_rl.config.train_rl import TrainRLConfig
from tests.support.configs import loaded


def config_of(arm: str) -> TrainRLConfig:
    bench = MaroonedBench(Path("bench"), Path("models"), 16, 8047)
    return loaded("train_rl", *bench.overrides(Path("run")), *bench.arms[arm])


def test_each_arm_has_what_its_name_says() -> None:
    rl, corrections, both = (config_of(arm) for arm in ("rl", "corrections", "both"))
    assert rl.supervisor_model is None and rl.train.corrections.mode == "none" and rl.train.turn_credit.mode == "none"
    assert corrections.train.reward_weights == {"return": 0.0}
    assert corrections.train.turn_credit.mode == "none" and corrections.train.beta == 0
    assert corrections.train.corrections == both.train.corrections
    assert corrections.train.learning_rate == both.train.learning_rate
    assert both == loaded("train_rl", *MaroonedBench(Path("bench"), Path("models"), 16, 8047).overrides(Path("run")))


def test_the_report_compares_the_same_islands() -> None:
    """Each island is as much better with corrections as any other; another one might not be."""
    gained = {"rl": 0.1, "corrections": 0.4}
    lines = [
        {
            "arm": arm,
            "seed": seed,
            "step": step,
            **{name: {f"island {i}": i / 10 + gain * step / 10 for i in range(4)} for name in FIGURES},
        }
        for arm, gain in gained.items()
        for seed in (1, 2)
        for step in (0, 10)
    ]
    table = [line.split() for line in report(lines).splitlines()]
    assert ["valid", "rl", "corrections"] in table
    (change,) = {tuple(line) for line in table if line[0:1] == ["change"]}
    assert (change[1], change[4]) == ("+0.100", "+0.400") and len(change) == 7, "eight islands: with intervals"
    (to_rl,) = {tuple(line) for line in table if line[0:2] == ["to", "rl"]}
    assert (to_rl[2], to_rl[5]) == ("+0.000", "+0.300")


def test_a_seed_that_not_all_arms_have_is_left_out() -> None:
    values = {name: {"island 1": 0.5, "island 2": 0.7} for name in FIGURES}
    lines = [{"arm": "rl", "seed": seed, "step": step, **values} for seed in (1, 2) for step in (0, 10)]
    lines += [{"arm": "both", "seed": 2, "step": step, **values} for step in (0, 10)]
    assert report(lines).startswith("seeds [2];")
