"""A process that sends a model's weights, and is killed or stopped by a signal in the middle.

    python -m tests.support.dying_sender MODEL SIGNAL AFTER BUFFER_BYTES

It prints where receivers meet it and which tensors come, as a line of JSON, broadcasts AFTER buffers, and then sends
itself the signal.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from classroom_rl.engines.vllm.weight_stream import open_meeting, packed, send
from classroom_rl.models.weight_transfer import TensorInfo, TransferGroup
from tests.conftest import ROOT

CPU = torch.device("cpu")


@contextmanager
def dying_sender(
    model: Path, with_signal: signal.Signals, after: int, buffer_bytes: int
) -> Iterator[tuple[subprocess.Popen, TransferGroup, list[TensorInfo]]]:
    """The process, the group as one receiver joins it, and the tensors that begin to come."""
    command = [sys.executable, "-m", "tests.support.dying_sender"]
    process = subprocess.Popen(
        [*command, str(model), with_signal.name, str(after), str(buffer_bytes)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        message = json.loads(next(line for line in process.stdout if line.startswith("{")))
        group = TransferGroup(f"dies by {with_signal.name}", 1, 2, buffer_bytes, **message["point"])
        yield process, group, [TensorInfo(**tensor) for tensor in message["tensors"]]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main(model: str, signal_name: str, after: int, buffer_bytes: int) -> None:
    weights = {name: weight + 1.0 for name, weight in load_file(Path(model) / "model.safetensors").items()}
    tensors = [
        TensorInfo(name, str(weight.dtype).removeprefix("torch."), list(weight.shape))
        for name, weight in weights.items()
    ]
    point, join = open_meeting(CPU, "127.0.0.1", 2, 600.0)
    print(json.dumps({"point": point, "tensors": [asdict(tensor) for tensor in tensors]}), flush=True)

    def buffers() -> Iterator[torch.Tensor]:
        for number, buffer in enumerate(packed([weights], tensors, buffer_bytes, CPU)):
            if number == after:
                os.kill(os.getpid(), signal.Signals[signal_name])
            yield buffer

    send(buffers(), tensors, join(), CPU)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
