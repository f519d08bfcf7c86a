"""What is on disk after a kill: the journal, and published weights that are complete or absent."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from classroom_rl.config.load import ROOT
from classroom_rl.engines.vllm.weights_gate import WeightsGate
from classroom_rl.errors import ConfigError, DataError, DeadlineExceeded
from classroom_rl.models.policy_folder import (
    check_policy,
    policies_folder,
    policy_path,
    remove_old_policies,
    write_policy,
)
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.store.journal import Journal, read_journal
from classroom_rl.system.run_lock import claim
from tests.support.turned_clock import run


def test_journal_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("turn", text="one\ntwo ✓")
    with journal.path.open("a") as file:
        file.write('{"event": "turn", "te')
    again = Journal(tmp_path)
    position = again.append("turn", text="three")
    assert [event["text"] for event in read_journal(journal.path)] == ["one\ntwo ✓", "three"]
    assert again.read_at(position)["text"] == "three"


def test_journal_line_is_there_before_append_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("turn", text="x")
    assert json.loads(journal.path.read_text())["text"] == "x"


def save_model(folder: Path) -> None:
    save_file({"w": numpy.zeros(4, numpy.float32)}, folder / "model.safetensors")


def test_policy_is_whole_or_not_there(tmp_path: Path) -> None:
    policy = PolicyVersion("run", 3)
    folder = policy_path(tmp_path, 3)

    def die_half_way(target: Path) -> None:
        save_model(target)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_policy(folder, policy, die_half_way)
    assert not folder.exists()
    write_policy(folder, policy, save_model)
    check_policy(folder, policy)
    assert [path.name for path in folder.parent.iterdir()] == ["v000003"]


@pytest.mark.parametrize("other", [PolicyVersion("run", 4), PolicyVersion("walk", 3)])
def test_policy_of_another_name_is_refused(tmp_path: Path, other: PolicyVersion) -> None:
    folder = policy_path(tmp_path, 3)
    write_policy(folder, PolicyVersion("run", 3), save_model)
    with pytest.raises(DataError, match="not run"):
        check_policy(folder, other)


def test_unmarked_or_empty_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="COMPLETE"):
        check_policy(tmp_path, PolicyVersion("run", 0))
    write_policy(tmp_path / "p", PolicyVersion("run", 0), lambda _: None)
    with pytest.raises(DataError, match="safetensors"):
        check_policy(tmp_path / "p", PolicyVersion("run", 0))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("COMPLETE", b"{", "COMPLETE is damaged"),
        ("COMPLETE", b"[]", "COMPLETE is damaged"),
        ("COMPLETE", b'{"run_id": "run"}', "COMPLETE is damaged"),
        ("model.safetensors", b"weights", r"model\.safetensors is missing or damaged"),
    ],
)
def test_damaged_policy_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write_policy(tmp_path / "p", PolicyVersion("run", 0), save_model)
    (tmp_path / "p" / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        check_policy(tmp_path / "p", PolicyVersion("run", 0))


def test_only_old_complete_policies_are_removed(tmp_path: Path) -> None:
    for version in range(4):
        write_policy(policy_path(tmp_path, version), PolicyVersion("run", version), save_model)
    unfinished = policy_path(tmp_path, 9)
    unfinished.mkdir()
    remove_old_policies(unfinished.parent, keep=2, version=3)
    assert sorted(path.name for path in unfinished.parent.iterdir()) == ["v000002", "v000003", "v000009"]


def test_a_resumed_trainings_version_stays_and_later_ones_go(tmp_path: Path) -> None:
    """They are of the steps that are trained anew; by their names they would be the newest."""
    for version in (4, 5, 2):
        write_policy(policy_path(tmp_path, version), PolicyVersion("run", version), save_model)
    remove_old_policies(policies_folder(tmp_path), keep=2, version=2)
    assert [path.name for path in policies_folder(tmp_path).iterdir()] == ["v000002"]


def test_gate_waits_for_turns_in_flight_and_keeps_new_ones_out() -> None:
    async def scenario() -> list[str]:
        gate, events = WeightsGate(), []
        inside, leave = asyncio.Event(), asyncio.Event()

        async def early_turn() -> None:
            async with gate.turn():
                inside.set()
                await leave.wait()
                events.append("early turn ended")

        async def late_turn() -> None:
            async with gate.turn():
                events.append("late turn")

        async def load() -> None:
            async with gate.closed(60):
                events.append("loading")
                await asyncio.sleep(0.01)
                events.append("loaded")

        tasks = [asyncio.create_task(early_turn())]
        await inside.wait()
        tasks.append(asyncio.create_task(load()))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(late_turn()))
        await asyncio.sleep(0.01)
        leave.set()
        await asyncio.gather(*tasks)
        return events

    assert run(scenario()) == ["early turn ended", "loading", "loaded", "late turn"]


def test_gate_opens_again_after_its_deadline() -> None:
    async def scenario() -> None:
        gate = WeightsGate()
        async with gate.turn():
            with pytest.raises(DeadlineExceeded, match="1 turns were still being sampled"):
                async with gate.closed(0.01):
                    raise AssertionError("a turn was still inside")
            async with asyncio.timeout(60), gate.turn():
                pass

    run(scenario())


def test_cancelled_turn_leaves_the_gate() -> None:
    async def scenario() -> None:
        gate = WeightsGate()

        async def stay() -> None:
            async with gate.turn():
                await asyncio.sleep(60)

        task = asyncio.create_task(stay())
        await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(60), gate.closed(60):
            pass

    run(scenario())


HOLDER = (
    "import sys; from pathlib import Path; from classroom_rl.system.run_lock import claim; "
    "f = claim('x', Path(sys.argv[1])); {}"
)


def test_a_run_folder_has_one_program_of_a_kind_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    wait = "print('has it', flush=True); import time; time.sleep(600)"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(wait), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "has it\n"
    with pytest.raises(ConfigError, match=rf"Process {holder.pid} works in .* as x already"):
        claim("x", tmp_path)
    claim("y", tmp_path).close()
    holder.kill()
    holder.communicate()
    claim("x", tmp_path).close()
