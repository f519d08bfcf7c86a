"""SIGKILL and SIGSTOP of either side at every tensor of weights that go from the trainer's memory into the server
(`train.publish_through: nccl`): the real sender, application and HTTP, gloo, and a teacher without a model.

The side that is struck strikes itself, so that it happens at the tensor that is meant. What was killed is started
again, what stands still goes on once the deadline is over. Then the version has to arrive as a whole, and nothing may
have waited for longer than the deadline and `_GRACE_S`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import psutil
import torch

from classroom_rl.errors import ClassroomError, DeadlineExceeded, EngineFailure
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.models.weight_transfer import TensorInfo
from classroom_rl.results.run_folder import read_lines
from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.processes import Child, Signals
from classroom_rl.trainer.weight_sender import WeightSender
from tests.chaos.cases import Case, Result, Settings, table
from tests.chaos.programs import wait_for
from tests.conftest import free_port
from tests.support.receiving_servers import receiving_servers
from tests.support.scripted_room import guided, write_templates

SENDER, SERVER = "sender", "server"
TENSORS = 10
_DEADLINE_S, _GRACE_S, _LIMIT_S = 4.0, 10.0, 120.0
_BUFFER_BYTES = 500
"""About the size of a tensor: each is broadcast by itself."""


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version."""
    generator = torch.Generator().manual_seed(version)
    return {f"layer{number}": torch.randn(10, 10 + number, generator=generator) for number in range(TENSORS)}


def strike(folder: Path, side: str, tensor: int) -> None:
    """End or stop this process, if that is wanted for this side and tensor; it is wanted once."""
    strike_file = folder / f"strike-{side}"
    if strike_file.is_file() and json.loads(strike_file.read_text())["tensor"] == tensor:
        signal_number = json.loads(strike_file.read_text())["signal"]
        strike_file.unlink()
        os.kill(os.getpid(), signal_number)


def receive(folder: Path, port: int) -> None:
    """The server's program."""
    generation = guided(write_templates(folder))
    tokenizer = load_tokenizer("teacher", (folder / "world").read_text())
    with receiving_servers([port], tokenizer, folder, generation, _DEADLINE_S) as (teachers, _):
        teachers[0].worker.at_tensor = partial(strike, folder, SERVER)
        while True:
            signal.pause()


def send(folder: Path, port: int) -> None:
    """The sender's program: it sends versions up to that in the file `wanted`, each until it has arrived, as the
    trainer does, and writes down each attempt."""
    log, infos = folder / "attempts.jsonl", [TensorInfo(n, "float32", list(t.shape)) for n, t in weights_of(0).items()]
    client = ClassroomClient(f"http://127.0.0.1:{port}", load_timeout_s=_DEADLINE_S)
    sender = WeightSender([client], torch.device("cpu"), _DEADLINE_S, _BUFFER_BYTES)
    while True:
        version = _arrived(folder) + 1
        if version > int((folder / "wanted").read_text()):
            time.sleep(0.05)
            continue
        sender.wait_for_servers(_LIMIT_S)
        started, error = time.monotonic(), ""
        try:
            sender.send(PolicyVersion("run", version), infos, _pieces(folder, version))
        except (DeadlineExceeded, EngineFailure) as failure:
            error = str(failure)
        line = {"version": version, "seconds": time.monotonic() - started, "error": error}
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _pieces(folder: Path, version: int) -> Iterator[dict[str, torch.Tensor]]:
    for number, (name, tensor) in enumerate(weights_of(version).items()):
        strike(folder, SENDER, number)
        yield {name: tensor}


def _arrived(folder: Path) -> int:
    return max((line["version"] for line in read_lines(folder / "attempts.jsonl") if not line["error"]), default=0)


class Transfer:
    """Both programs in a folder, and what is asked of them."""

    def __init__(self, folder: Path, settings: Settings):
        self._folder, self._port, self._signals = folder, free_port(), Signals()
        (folder / "world").write_text(str(settings.world / "blank"))
        (folder / "wanted").write_text("0")
        self.client = ClassroomClient(f"http://127.0.0.1:{self._port}")
        self.programs = {side: self._start(side) for side in (SERVER, SENDER)}
        self.client.wait_until_up(_LIMIT_S)

    def _start(self, side: str) -> Child:
        command = [sys.executable, "-m", "tests.chaos.transfer", side, str(self._folder), str(self._port)]
        return Child(side, command, self._signals, self._folder / f"{side}.log")

    def point(self, side: str, number: int, tensor: int, version: int) -> dict[str, float]:
        """Strike a side at a tensor of a version, and wait for the version.

        Raises:
            RuntimeError: if a part of a version was loaded.
            TimeoutError: if the version does not arrive.
        """
        strike_file = self._folder / f"strike-{side}"
        strike_file.write_text(json.dumps({"tensor": tensor, "signal": number}))
        attempts_before = len(read_lines(self._folder / "attempts.jsonl"))
        (self._folder / "wanted").write_text(str(version))
        wait_for(lambda: not strike_file.exists(), f"the strike at tensor {tensor}", _LIMIT_S)
        started = time.monotonic()
        if number == signal.SIGKILL:
            self.programs[side].wait()
            self.programs[side].stop()
            self.programs[side] = self._start(side)
        else:
            time.sleep(_DEADLINE_S + 1)
            psutil.Process(self.programs[side].pid).resume()
        wait_for(partial(self._has_arrived, version), f"version {version}", _LIMIT_S)
        attempts = read_lines(self._folder / "attempts.jsonl")[attempts_before:]
        return {"longest": max(attempt["seconds"] for attempt in attempts), "until": time.monotonic() - started}

    def _has_arrived(self, version: int) -> bool:
        try:
            policy = self.client.health().policy
        except ClassroomError:  # it is being started
            return False
        if policy.version not in (0, version - 1, version):
            raise RuntimeError(f"the server has {policy}, while {version} is sent")
        return _arrived(self._folder) == version

    def stop(self) -> None:
        for program in self.programs.values():
            program.stop()


def _play(side: str, number: int, folder: Path, settings: Settings) -> Result:
    wrong, points = [], []
    transfer = Transfer(folder, settings)
    try:
        for tensor in range(TENSORS):
            points.append(transfer.point(side, number, tensor, version=tensor + 1))
    except (RuntimeError, TimeoutError) as error:
        wrong.append(f"tensor {len(points)}: {error}")
    finally:
        transfer.stop()
    # Of a sender that stood still, that time counts, too.
    allowed = _DEADLINE_S + _GRACE_S
    wrong += [f"an attempt took {point['longest']:.1f} s" for point in points if point["longest"] > allowed]
    longest = {name: round(max((point[name] for point in points), default=0), 1) for name in ("longest", "until")}
    return Result({"points": len(points), **longest}, wrong)


def cases(settings: Settings) -> list[Case]:
    """Both signals for both sides, at every tensor."""
    return [
        Case("transfer", f"{side}-{number.name.lower()}", partial(_play, side, number))
        for side, number in product((SENDER, SERVER), (signal.SIGKILL, signal.SIGSTOP))
    ]


def summary(results: Sequence[Result]) -> str:
    """The points, the longest attempt, and the longest time until a version had arrived."""
    heads = ["side and signal", "points", "longest attempt, s", "longest until it arrived, s", "wrong"]
    return table(
        heads, [[result.name, *result.figures.values(), "; ".join(result.wrong) or "nothing"] for result in results]
    )


if __name__ == "__main__":
    {SERVER: receive, SENDER: send}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
