"""What trackers have of a training that was killed and goes on; their settings are tested in
tests/trainer/test_callbacks.py."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from classroom_rl.results.trackers import keep_tracked_run
from classroom_rl.system.processes import Signals
from tests.chaos.programs import overrides_of, start_server, wait_for
from tests.conftest import ROOT
from tests.support import scripted_server

_BLOCK, _FILE_HEADER, _CHUNK_HEADER = 32768, 7, 7


def records_in(path: Path) -> Iterator[Record]:
    """What an offline run of W&B wrote down, up to where it was killed: LevelDB's log format, chunks of at most a block
    that each begin with a checksum, a length, and whether they are whole (1), a first (2), middle (3) or last one (4).
    """
    data, position, payload = path.read_bytes(), _FILE_HEADER, b""
    while position + _CHUNK_HEADER <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _CHUNK_HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _CHUNK_HEADER
        if kind == 0 or position + length > len(data):
            return
        payload, position = payload + data[position : position + length], position + length
        if kind in (1, 4):
            yield Record.FromString(payload)
            payload = b""


def tracked_losses(run: Path) -> list[tuple[int, float]]:
    """The steps and losses of an offline run, as its curve has them."""
    points = []
    for record in records_in(next(run.glob("*.wandb"))):
        line = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "train/loss" in line:
            points.append((line["train/global_step"], line["train/loss"]))
    return points


def test_a_tracked_run_is_known_by_the_id_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(name, "")  # so that it is removed in the end
        monkeypatch.delenv(name)
    names = []
    for trackers, name in ((["wandb"], None), (["wandb", "trackio"], None), (["trackio"], "mine")):
        arguments = SimpleNamespace(report_to=trackers, run_name=name)
        keep_tracked_run(arguments, "run-1")
        names.append(arguments.run_name)
    assert names == [None, "run-1", "mine"], "Trackio goes on with the run of a name"
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("run-1", "allow")
    monkeypatch.setenv("WANDB_RUN_ID", "own")
    keep_tracked_run(arguments, "run-1")
    assert os.environ["WANDB_RUN_ID"] == "own"


@pytest.mark.full
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_curves_of_a_resumed_training_go_back_to_the_checkpoint_and_on_in_the_same_run(
    end: signal.Signals, world: Path, tmp_path: Path
) -> None:
    """A step that is made again has the same place on the curve's axis. Offline, W&B has not written down what it holds
    in its buffer when it is killed."""
    settings = ["logging.report_to=[wandb]", "logging.save_steps=2", "train.max_steps=4"]
    overrides, _ = overrides_of(tmp_path / "run", world, *settings)
    command = [sys.executable, "train_rl.py", *overrides]
    environment = {**os.environ, "WANDB_MODE": "offline"}
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR"):
        environment.pop(name, None)
    metrics = tmp_path / "run" / "metrics.jsonl"

    def three_steps() -> bool:
        assert trainer.poll() is None, (tmp_path / "trainer.log").read_text()[-4000:]
        return metrics.exists() and metrics.read_text().count("\n") == 3

    (tmp_path / "run").mkdir()
    pace = {scripted_server.MESSAGE_S: "0.3"}
    with Signals() as signals, start_server(overrides, tmp_path / "server.log", signals, pace):
        with (tmp_path / "trainer.log").open("w") as log:
            trainer = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(three_steps, "three steps", 500)
        finally:
            trainer.send_signal(end)
            trainer.wait()
        resumed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    first, second = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "run" / "run_id").read_text()
    assert [folder.name.endswith(f"-{run_id}") for folder in (first, second)] == [True, True]
    before, after = tracked_losses(first), tracked_losses(second)
    assert [step for step, _ in after] == [3, 4]
    if end == signal.SIGINT:
        assert [step for step, _ in before] == [1, 2, 3]
        assert after[0][1] == pytest.approx(before[2][1], abs=1e-5), "the journal had the batch"
