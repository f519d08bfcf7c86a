"""Every schedule plays the same conversations, and lockstep is lockstep."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.schedules import SCHEDULES, Lockstep, measure, show
from classroom_rl.environments.classroom.conversation import State
from tests.conftest import quickstart_overrides
from tests.support.configs import loaded
from tests.support.scripted_engine import ScriptedEngine


def test_every_schedule_plays_the_same_conversations(tokenizer, world: Path, tmp_path: Path, monkeypatch, capsys):
    async def start(wanted, *_):
        lines = {"teacher": lambda _: "Hello! Where do you go?", "student": lambda _: "I go home."}
        return {role: ScriptedEngine(tokenizer, lines[role]) for role in wanted}

    monkeypatch.setattr("classroom_rl.server.open_models._start_engines", start)
    config = loaded("train_rl", *quickstart_overrides(tmp_path, world / "blank", world, 1))
    show(asyncio.run(measure(config, rounds=2, judge_s=0.001)))
    printed = capsys.readouterr().out
    assert "16 of 16 conversations are word for word the same" in printed
    lines = printed.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == list(SCHEDULES) and lines[0].endswith("1.00 × concurrent")
    assert all(line.count(".") == 4 for line in lines), "two rounds, their median, the ratio"


@pytest.mark.parametrize("lengths", [(1, 3, 2), (2, 2, 2)])
def test_in_lockstep_nobody_is_ahead(lengths: tuple[int, ...]) -> None:
    """Each takes so many pairs of turns, then is judged; the third moment of a conversation is that of all."""
    states: list[State] = []

    async def talk(lockstep: Lockstep, turns: int) -> None:
        for state in [State.TEACHER_TURN, State.STUDENT_TURN] * turns + [State.JUDGE_TURN]:
            await lockstep.wait_for_phase(state)
            states.append(state)
            await asyncio.sleep(0)
        lockstep.deregister_one()

    async def run() -> None:
        lockstep = Lockstep().register(len(lengths))
        async with asyncio.timeout(60):
            await asyncio.gather(*(talk(lockstep, turns) for turns in lengths))

    asyncio.run(run())
    expected = []
    for turn in range(max(lengths)):
        speaking = sum(turns > turn for turns in lengths)
        expected += [State.TEACHER_TURN] * speaking + [State.STUDENT_TURN] * speaking
    assert states == expected + [State.JUDGE_TURN] * len(lengths)
