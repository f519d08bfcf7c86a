"""The benchmark measures what it says: the same conversations with each schedule, and lockstep is lockstep."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks import cpu_dtypes, openmp_spin
from benchmarks.schedules import SCHEDULES, Lockstep, measure, show
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.conversation import State
from tests.conftest import quickstart_overrides
from tests.support.scripted_engine import ScriptedEngine


def test_every_schedule_plays_the_same_conversations(tokenizer, world: Path, tmp_path: Path, monkeypatch, capsys):
    async def start(wanted, *_):
        lines = {"teacher": lambda _: "Hello! Where do you go?", "student": lambda _: "I go home."}
        return {role: ScriptedEngine(tokenizer, lines[role]) for role in wanted}

    monkeypatch.setattr("classroom_rl.server.open_models._start_engines", start)
    config = load(TrainRLConfig, "train_rl", quickstart_overrides(tmp_path, world / "blank", world, 1), check_train_rl)
    show(asyncio.run(measure(config, rounds=2, judge_s=0.001)))
    printed = capsys.readouterr().out
    assert "16 of 16 conversations are word for word the same" in printed
    lines = printed.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == list(SCHEDULES) and lines[0].endswith("1.00 × concurrent")
    assert all(line.count(".") == 4 for line in lines), "two rounds, their median, the ratio"


def test_both_dtypes_multiply_the_same_shapes() -> None:
    sizes = [{name: own().shape for name, own in cpu_dtypes.products(5, dtype).items()} for dtype in cpu_dtypes.DTYPES]
    assert sizes[0] == sizes[1] and len(sizes[0]) == 3 * len(cpu_dtypes.SHAPES)
    assert sizes[0]["up, forward"] == (5, 1536) and sizes[0]["up, gradient of the weights"] == (1536, 576)
    assert all(len(own) == 2 for own in cpu_dtypes.measure(5, rounds=1).values())


@pytest.mark.parametrize("lengths", [(1, 3, 2), (2, 2, 2)])
def test_in_lockstep_nobody_is_ahead(lengths: tuple[int, ...]) -> None:
    """Each takes so many pairs of turns, then is judged; the third moment of a conversation is that of all."""
    happened: list[State] = []

    async def talk(lockstep: Lockstep, turns: int) -> None:
        for state in [State.TEACHER_TURN, State.STUDENT_TURN] * turns + [State.JUDGE_TURN]:
            await lockstep.wait_for_phase(state)
            happened.append(state)
            await asyncio.sleep(0)
        lockstep.deregister_one()

    async def run() -> None:
        lockstep = Lockstep().register(len(lengths))
        async with asyncio.timeout(60):
            await asyncio.gather(*(talk(lockstep, turns) for turns in lengths))

    asyncio.run(run())
    expected = []
    for place in range(max(lengths)):
        still = sum(turns > place for turns in lengths)
        expected += [State.TEACHER_TURN] * still + [State.STUDENT_TURN] * still
    assert happened == expected + [State.JUDGE_TURN] * len(lengths)


def test_each_setting_of_the_spin_benchmark_has_an_environment_of_its_own(monkeypatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    monkeypatch.setenv("KMP_BLOCKTIME", "5")
    found = {each: openmp_spin.environment_for(each) for each in ("default", "passive", "300")}
    said = {
        each: {name: own[name] for name in openmp_spin.OPENMP_VARIABLES if name in own} for each, own in found.items()
    }
    assert said == {"default": {}, "passive": {"OMP_WAIT_POLICY": "passive"}, "300": {"GOMP_SPINCOUNT": "300"}}


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
    found = openmp_spin.measure(["default", "300"], Path("model"), rounds=2, steps=1, busy=1)
    assert Trainer.steps == ["default", "300"] * 3 + ["300", "default"] * 2, "the first two are no part of the figures"
    assert found == {"quiet": {"default": [3, 8], "300": [4, 7]}, "busy": {"default": [5, 10], "300": [6, 9]}}
    table = openmp_spin.report({"quiet": {"a": [1.0, 2.0, 3.0], "b": [4.0]}, "busy": {"a": [10.0], "b": [5.0]}})
    assert table.splitlines()[2:] == [
        "| a | 2 [1, 3] | 1.00 × | 10 [10, 10] | 1.00 × |",
        "| b | 4 [4, 4] | 2.00 × | 5 [5, 5] | 0.50 × |",
    ]
