"""Estimates the host memory of a training and its engines, for the budget of `dry_run=true`. All sizes are in bytes.

The estimate is a lower bound, as in memory/budget.py. It leaves out memory-mapped files (from which ZeRO-3 reads its
weights) and the operating system.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from classroom_rl.memory.budget import CUDA_CONTEXT, GIB, Part, TrainerJob, total, trainer_memory
from classroom_rl.system.container_memory import container_limit

PROCESS = GIB
"""The approximate memory of an idle process that has imported torch; measured values were 0.6 to 1.7 GiB."""
PUBLISHED_AT_ONCE = 1_000_000_000
"""Bytes of weights that the main process gathers before it writes them (`SHARD_BYTES` in trainer/sharded_save.py)."""


def machine_memory() -> int:
    """The memory that programs can use, in bytes: the machine's, or the container's limit if that is lower."""
    memory = psutil.virtual_memory().total
    return min(memory, container_limit() or memory)


@dataclass(frozen=True)
class EngineOnHost:
    """One engine: the bytes of its weights on all its GPUs together, its number of worker processes, and the bytes of
    its KV cache, which is in host memory only on CPUs."""

    weights: int
    workers: int
    cache: int


def trainer_process(job: TrainerJob, on_cpu: bool) -> list[Part]:
    """The host memory of one training process."""
    if on_cpu:
        memory = trainer_memory(job)
        peak = total(memory.held) - CUDA_CONTEXT + max(total(memory.backward), total(memory.step))
        return [Part("process", PROCESS), Part("what the trainer holds and computes", peak)]
    parts = [Part("process", PROCESS)]
    launch, size = job.launch, job.number_bytes
    share = -(-job.trained // launch.processes)
    if launch.zero_stage != 3:
        parts.append(Part("largest matrix, as weights are read", 4 * job.shape.head))
    if launch.fsdp:  # one process gathers the whole checkpoint; here it is divided evenly among the processes
        checkpoint = job.trained * (4 + job.state_bytes)
        parts.append(Part("a checkpoint's weights and optimizer states", -(-checkpoint // launch.processes)))
    if launch.optimizer_on_host:
        parts.append(Part("master weights, gradients (32 bit)", share * 8))
        parts.append(Part("optimizer states", share * job.state_bytes))
    if launch.weights_on_host:
        models = 2 if job.reference else 1
        parts.append(Part(f"weights ({8 * size} bit)", models * -(-job.shape.parameters // launch.processes) * size))
    return parts


def host_parts(
    trainer: TrainerJob | None, engines: Sequence[EngineOnHost], asleep: int, on_cpu: bool, versions: int = 0
) -> list[Part]:
    """The contents of one machine's memory at its peak.

    Args:
        trainer: one of the training processes; None leaves the trainer out.
        asleep: bytes of the weights of sleeping engines, which are in host memory.
        on_cpu: whether engines and trainer run on CPUs, where no engine sleeps.
        versions: the number of published versions in shared memory.
    """
    parts = []
    if trainer is not None:
        processes = -(-trainer.launch.processes // trainer.launch.machines)
        for part in trainer_process(trainer, on_cpu):
            parts.append(Part(f"{processes} × trainer: {part.name}", processes * part.size))
        if not on_cpu:
            parts.append(Part("trainer: weights as they are written", PUBLISHED_AT_ONCE))
        published = versions * trainer.trained * trainer.number_bytes
        parts.append(Part(f"{versions} × published weights (/dev/shm)", published))
    if engines:
        parts.append(Part("processes of the engines", sum(1 + engine.workers for engine in engines) * PROCESS))
    if on_cpu:
        parts.append(Part("weights of the engines", sum(engine.weights for engine in engines)))
        parts.append(Part("caches of the engines", sum(engine.cache for engine in engines)))
    else:
        parts.append(Part("weights of the engines (asleep)", asleep))
    return [part for part in parts if part.size]


def what_does_not_fit(parts: Sequence[Part], job: TrainerJob | None, machine: int) -> str | None:
    """A message with suggestions if the parts need more than the machine's memory; None if they fit."""
    needed = total(parts)
    if needed <= machine:
        return None
    largest = ", ".join(
        f"{part.name} {part.size / GIB:.2f} GiB" for part in sorted(parts, key=lambda part: -part.size)[:3]
    )
    suggestions = ["a machine with more memory"]
    if job is not None and (job.launch.optimizer_on_host or job.launch.weights_on_host):
        suggestions.append(
            "less offloading in accelerate's configuration (offload_optimizer_device, offload_param_device)"
        )
    if any("/dev/shm" in part.name for part in parts):
        suggestions.append("train.publish_through=disk, or a smaller train.keep_published_policies")
    if any("asleep" in part.name for part in parts):
        suggestions.append(
            "smaller models, or GPUs of the server's own and generation.colocate=false, with which none sleeps"
        )
    if job is not None and job.launch.processes > job.launch.machines:
        suggestions.append("fewer processes on each machine")
    return (
        f"A machine with {machine / GIB:.2f} GiB of memory cannot hold what server and trainer need of it: "
        f"{needed / GIB:.2f} GiB, most of it {largest}. Ways out: {', or '.join(suggestions)}."
    )
