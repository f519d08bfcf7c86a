"""How long publishing weights takes, through the disk, through shared memory, and from memory to memory, in seconds per
GB.

    python -m benchmarks.publish [--gb 1] [--rounds 5] [--folder runs/publish]

They publish the same model with random weights, in turns: they write it, take its fingerprint, mark the folder as
complete, and, on disk, wait until it is there. Then a reader reads all of it, as an engine does that loads it.
Versions in memory are written over old ones; the first few, whose files are new or not mapped yet, are reported by
themselves.
The earlier way through the disk, which copied each weight first and read the file again, is measured beside them.
`train.publish_through: nccl` has no files: another process, on the same CPUs, receives the weights over gloo while they
are sent, so that its seconds are those of publishing and reading together. Between GPUs this is NCCL's business.
"""

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from classroom_rl.engines.vllm.weight_stream import GlooGroup, Group, Receiver, open_meeting, packed, send
from classroom_rl.models.policy_folder import (
    MARKER,
    oldest_policy,
    open_shared_memory,
    policies_folder,
    policy_name,
    remove_old_policies,
    shared_memory_folder,
    write_policy,
    write_whole,
)
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.weight_transfer import TensorInfo
from classroom_rl.trainer.model_loading import prepare_cpu
from classroom_rl.trainer.sharded_save import write_shards
from classroom_rl.trainer.weight_files import KeptFiles
from classroom_rl.trainer.weight_sender import BUFFER_BYTES

EARLIER, DISK, MEMORY, SENT = "disk, before", "disk", "memory", "sent"
CPU, WAIT_S = torch.device("cpu"), 600.0
KEEP = 2  # the default of train.keep_published_policies
FIRST_IN_MEMORY = 2 * (KEEP + 1)
"""Versions until every file in memory is there and mapped: the first half makes files, the second maps them."""
_TENSOR = (2048, 4096)


def pieces(weights: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """One parameter at a time, as a trainer gathers them."""
    for name, tensor in weights.items():
        yield {name: tensor}


def save_as_before(weights: dict[str, torch.Tensor], target: Path) -> None:
    """A copy of each weight, then one file of all of them, which is read again for its fingerprint."""
    save_file({name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}, target / "model.safetensors")
    digest = xxhash.xxh3_128()
    with (target / "model.safetensors").open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)


def publish(
    way: str, parent: Path, version: int, weights: dict[str, torch.Tensor], kept: KeptFiles
) -> tuple[float, float]:
    """Publish a version and read it. Returns the seconds of both."""
    folder, policy = parent / policy_name(version), PolicyVersion("benchmark", version)
    started = time.perf_counter()
    if way == EARLIER:
        write_whole(folder, lambda target: save_as_before(weights, target))
        (folder / MARKER).touch()
    elif way == DISK:
        write_policy(folder, policy, lambda target: write_shards(pieces(weights), target))
    else:
        over = oldest_policy(parent, KEEP)
        write_policy(folder, policy, lambda target: write_shards(pieces(weights), target, kept=kept), over=over)
    written = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                weights[name].copy_(file.get_tensor(name))
    read = time.perf_counter()
    remove_old_policies(parent, KEEP + 1 if way == MEMORY else KEEP, version)
    return written - started, read - written


def receive(point: dict, tensors: Sequence[TensorInfo]) -> None:
    """Receive versions until the sender has gone, and confirm each."""
    prepare_cpu("bfloat16")
    where = point["master_address"], point["master_port"]
    limits = {"wait_for_workers": False, "timeout": timedelta(seconds=WAIT_S)}
    group = GlooGroup(torch.distributed.TCPStore(*where, is_master=False, **limits), 1, 2, WAIT_S)
    weights = {info.name: torch.empty(info.shape, dtype=getattr(torch, info.dtype)) for info in tensors}
    while True:
        receiver = Receiver(tensors, BUFFER_BYTES, group, CPU)
        for name, tensor in receiver:
            weights[name].copy_(tensor)
        receiver.check()
        group.broadcast(torch.ones(1), src=1)


@contextmanager
def receiving(tensors: Sequence[TensorInfo]) -> Iterator[Group]:
    """The group of this process and one that receives."""
    point, join = open_meeting(CPU, "127.0.0.1", 2, WAIT_S)
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(point, tensors), daemon=True)
    process.start()
    try:
        yield join()
    finally:
        process.kill()


def send_version(weights: dict[str, torch.Tensor], tensors: Sequence[TensorInfo], group: Group) -> tuple[float, float]:
    """Send a version, and wait until it is there. Returns the seconds; there is no reading afterwards."""
    started = time.perf_counter()
    send(packed(pieces(weights), tensors, BUFFER_BYTES, CPU), tensors, group, CPU)
    group.broadcast(torch.zeros(1), src=1)
    return time.perf_counter() - started, 0.0


def measure(folder: Path, rounds: int, weights: dict[str, torch.Tensor]) -> dict[str, list[tuple[float, float]]]:
    """The seconds of publishing and reading, version by version: of memory the first ones, too, which come first."""
    shutil.rmtree(shared_memory_folder(folder), ignore_errors=True)  # of a benchmark that was killed
    parents = {EARLIER: policies_folder(folder) / "earlier", DISK: policies_folder(folder)}
    parents[MEMORY] = open_shared_memory(folder)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in (*parents, SENT)}
    kept_files = KeptFiles()
    tensors = [TensorInfo(name, "bfloat16", list(tensor.shape)) for name, tensor in weights.items()]
    try:
        for version in range(FIRST_IN_MEMORY):
            seconds[MEMORY].append(publish(MEMORY, parents[MEMORY], version, weights, kept_files))
        with receiving(tensors) as group:
            for version in range(FIRST_IN_MEMORY, FIRST_IN_MEMORY + rounds + 1):
                timings = {way: publish(way, parent, version, weights, kept_files) for way, parent in parents.items()}
                timings[SENT] = send_version(weights, tensors, group)
                for way, timing in timings.items() if version > FIRST_IN_MEMORY else ():  # the first of a way warms up
                    seconds[way].append(timing)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(shared_memory_folder(folder), ignore_errors=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/publish"))
    arguments = parser.parse_args()
    if arguments.folder.exists():
        sys.exit(f"{arguments.folder} is there already, and what is in it would be removed: name another --folder.")
    prepare_cpu("bfloat16")
    count = max(1, round(arguments.gb * 1e9 / (2 * _TENSOR[0] * _TENSOR[1])))
    weights = {f"model.layers.{layer}.weight": torch.randn(_TENSOR).bfloat16() for layer in range(count)}
    size = sum(tensor.nbytes for tensor in weights.values()) / 1e9
    seconds = measure(arguments.folder, arguments.rounds, weights)
    first, seconds[MEMORY] = seconds[MEMORY][:FIRST_IN_MEMORY], seconds[MEMORY][FIRST_IN_MEMORY:]
    print(f"{size:.2f} GB, {arguments.rounds} rounds, seconds per GB (median): publishing, reading")
    new, mapped = first[: KEEP + 1], first[KEEP + 1 :]
    for way, timings in {**seconds, "memory, into new files": new, "memory, files not mapped yet": mapped}.items():
        published, read = ([timing[index] / size for timing in timings] for index in (0, 1))
        every = "  ".join(f"{value:.2f}" for value in published)
        print(f"  {way:29} {median(published):.2f}  {median(read):.2f}   all: {every}")
    for way in (DISK, MEMORY):
        both = median(sum(other) / sum(sent) for other, sent in zip(seconds[way], seconds[SENT], strict=True))
        print(f"sent {both:.1f} × as fast as {way} with a reader")
    for way in (EARLIER, DISK):
        pairs = list(zip(seconds[way], seconds[MEMORY], strict=True))
        publishing = median(other / memory for (other, _), (memory, _) in pairs)
        both = median(sum(other) / sum(memory) for other, memory in pairs)
        print(f"memory {publishing:.1f} × as fast as {way}; with a reader {both:.1f} ×")


if __name__ == "__main__":
    main()
