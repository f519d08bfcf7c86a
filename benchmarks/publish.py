"""How long publishing weights takes, through the disk and through shared memory, in seconds per GB.

    python -m benchmarks.publish [--gb 1] [--rounds 5] [--folder runs/publish]

They publish the same model with random weights, in turns: they write it, take its fingerprint, mark the folder as
complete, and, on disk, wait until it is there. Then a reader reads all of it, as an engine does that loads it. The
earlier way through the disk, which copied each weight first and read the file again, is measured beside them.
"""

import argparse
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from src.models.policy_folder import (
    MARKER,
    open_shared_memory,
    policies_folder,
    policy_name,
    remove_old_policies,
    shared_memory_folder,
    write_policy,
    write_whole,
)
from src.models.policy_version import PolicyVersion
from src.training.cpu import prepare_cpu
from src.training.sharded_save import write_shards

EARLIER = "disk, before"
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


def publish(parent: Path, version: int, weights: dict[str, torch.Tensor], earlier: bool) -> tuple[float, float]:
    """Publish a version and read it. Returns the seconds of both."""
    folder, policy = parent / policy_name(version), PolicyVersion("benchmark", version)
    started = time.perf_counter()
    if earlier:
        write_whole(folder, lambda target: save_as_before(weights, target))
        (folder / MARKER).touch()
    else:
        write_policy(folder, policy, lambda target: write_shards(pieces(weights), target))
    written = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                weights[name].copy_(file.get_tensor(name))
    read = time.perf_counter()
    remove_old_policies(parent, 1, version)
    return written - started, read - written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/publish"))
    arguments = parser.parse_args()
    prepare_cpu("bfloat16")
    count = max(1, round(arguments.gb * 1e9 / (2 * _TENSOR[0] * _TENSOR[1])))
    weights = {f"model.layers.{place}.weight": torch.randn(_TENSOR).bfloat16() for place in range(count)}
    size = sum(tensor.nbytes for tensor in weights.values()) / 1e9
    disk, memory = policies_folder(arguments.folder), open_shared_memory(arguments.folder)
    parents = {EARLIER: disk / "earlier", "disk": disk, "memory": memory}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in parents}
    try:
        for version in range(arguments.rounds + 1):
            for way, parent in parents.items():
                found = publish(parent, version, weights, earlier=way == EARLIER)
                if version:  # the first one warms up
                    seconds[way].append(found)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
        shutil.rmtree(shared_memory_folder(arguments.folder), ignore_errors=True)
    print(f"{size:.2f} GB, {arguments.rounds} rounds, seconds per GB (median): publishing, reading")
    for way, found in seconds.items():
        published, read = ([each[place] / size for each in found] for place in (0, 1))
        every = "  ".join(f"{each:.2f}" for each in published)
        print(f"  {way:12} {median(published):.2f}  {median(read):.2f}   all: {every}")
    for way in (EARLIER, "disk"):
        pairs = zip(seconds[way], seconds["memory"], strict=True)
        print(f"memory {median(other / memory for (other, _), (memory, _) in pairs):.1f} × as fast as {way}")


if __name__ == "__main__":
    main()
