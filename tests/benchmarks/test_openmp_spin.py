"""The settings of OpenMP: each has its own environment, and they take turns."""

from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks import openmp_spin


def test_each_setting_of_the_spin_benchmark_has_an_environment_of_its_own(monkeypatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    monkeypatch.setenv("KMP_BLOCKTIME", "5")
    chosen = {}
    for setting in ("default", "passive", "300"):
        environment = openmp_spin.environment_for(setting)
        chosen[setting] = {name: environment[name] for name in openmp_spin.OPENMP_VARIABLES if name in environment}
    assert chosen == {"default": {}, "passive": {"OMP_WAIT_POLICY": "passive"}, "300": {"GOMP_SPINCOUNT": "300"}}


@pytest.mark.full
def test_the_spin_benchmark_trains_the_quickstarts_model(world: Path) -> None:
    with openmp_spin.Trainer("300", world / "blank", steps=1) as trainer:
        assert trainer.step() > 0 and trainer.step() > 0


def test_the_settings_take_turns_in_both_states_and_stand_beside_the_first(monkeypatch) -> None:
    class Trainer(nullcontext):
        steps: ClassVar = []

        def __init__(self, setting: str, *_: object):
            super().__init__(self)
            self.setting = setting

        def step(self) -> float:
            self.steps.append(self.setting)
            return float(len(self.steps))

    monkeypatch.setattr(openmp_spin, "Trainer", Trainer)
    seconds = openmp_spin.measure(["default", "300"], Path("model"), rounds=2, steps=1, busy=1)
    assert Trainer.steps == ["default", "300"] * 3 + ["300", "default"] * 2, "the first two are no part of the figures"
    assert seconds == {"quiet": {"default": [3, 8], "300": [4, 7]}, "busy": {"default": [5, 10], "300": [6, 9]}}
    table = openmp_spin.report({"quiet": {"a": [1.0, 2.0, 3.0], "b": [4.0]}, "busy": {"a": [10.0], "b": [5.0]}})
    assert table.splitlines()[2:] == [
        "| a | 2 [1, 3] | 1.00 × | 10 [10, 10] | 1.00 × |",
        "| b | 4 [4, 4] | 2.00 × | 5 [5, 5] | 0.50 × |",
    ]
