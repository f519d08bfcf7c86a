"""How much of a machine's own memory a training and its engines need, for the budget of `dry_run=true`. In bytes.

Counted is what has to be there, as in src/memory/budget.py. Files that are only mapped (ZeRO-3 reads its weights so)
and the system itself are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from src.memory.budget import CUDA_CONTEXT, GIB, Part, TrainerJob, total, trainer_memory
from src.system.container_memory import container_limit

PROCESS = GIB
"""What a process with torch and its libraries takes before it holds anything, roughly; 0.6 to 1.7 GiB were measured."""
PUBLISHED_AT_ONCE = 1_000_000_000
"""Bytes of weights that the main process gathers before it writes them: `SHARD_BYTES` of src/training/sharded_save.py."""


def machine_memory() -> int:
    """What programs may use here: the machine's memory, or less where a container has a limit."""
    memory = psutil.virtual_memory().total
    return min(memory, container_limit() or memory)


@dataclass(frozen=True)
class EngineOnHost:
    """One engine: its weights in bytes on all of its GPUs together, its worker processes, and on CPUs its cache."""

    weights: int
    workers: int
    cache: int


def trainer_process(job: TrainerJob, on_cpu: bool) -> list[Part]:
    """What one process of a training has in the host's memory."""
    if on_cpu:
        memory = trainer_memory(job)
        fullest = total(memory.held) - CUDA_CONTEXT + max(total(memory.backward), total(memory.step))
        return [Part("process", PROCESS), Part("what the trainer holds and computes", fullest)]
    parts = [Part("process", PROCESS)]
    launch, size = job.launch, job.number_bytes
    share = -(-job.trained // launch.processes)
    if launch.zero_stage != 3:
        parts.append(Part("largest matrix, as weights are read", 4 * job.shape.head))
    if launch.optimizer_on_host:
        parts.append(Part("master weights, gradients (32 bit)", share * 8))
        parts.append(Part("optimizer states", share * job.state_bytes))
    if launch.weights_on_host:
        models = 2 if job.reference else 1
        parts.append(Part(f"weights ({8 * size} bit)", models * -(-job.shape.parameters // launch.processes) * size))
    return parts


def host_parts(trainer: TrainerJob | None, engines: Sequence[EngineOnHost], asleep: int, on_cpu: bool) -> list[Part]:
    """What lies in one machine's memory at its fullest.

    Args:
        trainer: one of its processes; None leaves the trainer out.
        asleep: the bytes of weights of engines that sleep.
        on_cpu: whether engines and trainer run on CPUs; nothing sleeps there.
    """
    parts = []
    if trainer is not None:
        processes = -(-trainer.launch.processes // trainer.launch.machines)
        for part in trainer_process(trainer, on_cpu):
            parts.append(Part(f"{processes} × trainer: {part.name}", processes * part.size))
        if not on_cpu:
            parts.append(Part("trainer: weights as they are written", PUBLISHED_AT_ONCE))
    if engines:
        parts.append(Part("processes of the engines", sum(1 + each.workers for each in engines) * PROCESS))
    if on_cpu:
        parts.append(Part("weights of the engines", sum(each.weights for each in engines)))
        parts.append(Part("caches of the engines", sum(each.cache for each in engines)))
    else:
        parts.append(Part("weights of the engines (asleep)", asleep))
    return [part for part in parts if part.size]


def what_does_not_fit(parts: Sequence[Part], job: TrainerJob | None, machine: int) -> str | None:
    """A message if the parts are more than the machine's memory, with the ways out; None if they are not."""
    needed = total(parts)
    if needed <= machine:
        return None
    largest = ", ".join(
        f"{part.name} {part.size / GIB:.2f} GiB" for part in sorted(parts, key=lambda part: -part.size)[:3]
    )
    ways = ["a machine with more memory"]
    if job is not None and (job.launch.optimizer_on_host or job.launch.weights_on_host):
        ways.append("less offloading in accelerate's configuration (offload_optimizer_device, offload_param_device)")
    if any("asleep" in part.name for part in parts):
        ways.append("smaller models, or GPUs of the server's own and generation.colocate=false, with which none sleeps")
    if job is not None and job.launch.processes > job.launch.machines:
        ways.append("fewer processes on each machine")
    return (
        f"A machine with {machine / GIB:.2f} GiB of memory cannot hold what server and trainer need of it: "
        f"{needed / GIB:.2f} GiB, most of it {largest}. Ways out: {', or '.join(ways)}."
    )
