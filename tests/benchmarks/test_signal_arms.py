"""The benchmark of signal trains what its arms say, and counts the conversations that were played."""

from pathlib import Path

import pytest

from benchmarks.signal_arms import SignalBench, conversations_needed, conversations_played, report
from classroom_rl.config.train_rl import TrainRLConfig
from tests.support.configs import loaded


def config_of(arm: str) -> TrainRLConfig:
    bench = SignalBench(Path("bench"), Path("models"), 24, 8049)
    return loaded("train_rl", *bench.overrides(Path("run")), *bench.arms[arm])


def test_each_arm_has_what_its_name_says() -> None:
    configs = {arm: config_of(arm) for arm in SignalBench.arms}
    for arm, config in configs.items():
        expected = next((mode for mode in ("drop", "resample") if mode in arm), "keep")
        assert config.train.groups_without_variance == expected, arm
        assert config.dataset.curriculum == ("curriculum" in arm)
        assert (config.train.turn_credit.mode == "immediate") == ("turn_credit" in arm)
        assert config.train.max_steps == configs["keep"].train.max_steps
        assert config.train.learning_rate == configs["keep"].train.learning_rate


def test_further_problems_count_as_conversations() -> None:
    assert conversations_played([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}, {"train_runtime": 9}]) == 128
    assert conversations_played([{"reward": 0.5, "groups/played": 8}, {"reward": 0.5, "groups/played": 13}]) == 168


def versions(*found: tuple[float, float]) -> dict[int, dict]:
    return {
        3 * index: {"conversations": conversations, "rewards": {"a": reward, "b": reward}}
        for index, (conversations, reward) in enumerate(found)
    }


def test_what_is_needed_is_interpolated_between_versions() -> None:
    assert conversations_needed(versions((0, 0.5), (200, 0.8), (400, 1.0))) == pytest.approx(300)
    assert conversations_needed(versions((0, 0.5), (200, 0.8))) is None


def test_the_report_compares_an_arm_with_keep_seed_by_seed() -> None:
    lines = [
        {"arm": arm, "seed": seed, "step": step, **line}
        for arm, half in (("keep", 1), ("drop", 2))
        for seed in (1, 2)
        for step, line in versions((0, 0.5), (400 * seed / half, 1.0)).items()
    ]
    printed = report(lines).splitlines()
    assert printed[1].split() == ["keep", "[320,", "640]", "480", "1.00", "[1.0,", "1.0]", "1.000"]
    assert printed[2].split() == ["drop", "[160,", "320]", "240", "0.50", "[0.5,", "0.5]", "1.000"]
