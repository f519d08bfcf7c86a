"""Checks that the engines of one server fit on their GPU together. Each engine reserves a share of it when it starts.

All engines of a server use the first GPUs that it sees, so their shares add up on the first one.
"""

from collections.abc import Mapping, Sequence

from classroom_rl.config.base import ModelConfig
from classroom_rl.errors import ConfigError
from classroom_rl.memory.budget import CUDA_CONTEXT
from classroom_rl.memory.sources import memory_by_nvidia_smi
from classroom_rl.rollout.scheduler import Phase

_ROUNDING = 1e-9


def awake_together(seats: Sequence[str], phases: Sequence[Phase]) -> dict[str, list[str]]:
    """Groups of engines that are awake at the same time, by name: those of each phase, or all without phases."""
    if not phases:
        return {"engines": list(seats)}
    groups = {f"engines of the {phase.name}": [seat for seat in seats if seat in phase.seats] for phase in phases}
    return {name: group for name, group in groups.items() if group}


def share_of(seats: Mapping[str, ModelConfig], group: Sequence[str]) -> float:
    """The share of a GPU that these engines take together."""
    return sum(seats[seat].vllm.gpu_memory_utilization for seat in group)


def named_shares(seats: Mapping[str, ModelConfig], group: Sequence[str]) -> str:
    """The config keys and values of these engines' shares, written as a sum."""
    return " + ".join(
        f"{seat}_model.vllm.gpu_memory_utilization={seats[seat].vllm.gpu_memory_utilization:g}" for seat in group
    )


def what_is_crowded(seats: Mapping[str, ModelConfig], phases: Sequence[Phase], gpu_bytes: int | None) -> list[str]:
    """One message for each group of engines that cannot be awake together on one GPU.

    Args:
        gpu_bytes: the GPU's memory. If it is known, the engines' CUDA contexts count besides their shares.
    """
    contexts = 0.0 if gpu_bytes is None else len(seats) * CUDA_CONTEXT / gpu_bytes
    found = []
    for name, group in awake_together(list(seats), phases).items():
        share = share_of(seats, group)
        if share + contexts <= 1 + _ROUNDING:
            continue
        beside = f", and their CUDA contexts {contexts:.3f} more" if contexts else ""
        way = "" if phases or len(group) < 3 else ", or set generation.schedule=phased"
        found.append(
            f"The {name} share one GPU, but ask for {share:g} of it{beside}: {named_shares(seats, group)}. vLLM "
            f"refuses the engine that finds less than its share. Lower them until a few hundredths of it are left{way}."
        )
    return found


def refuse_crowded_gpu(seats: Mapping[str, ModelConfig], phases: Sequence[Phase]) -> None:
    """Check the shares before the first engine starts. On CPUs they have no meaning, and nothing is checked. CUDA
    decides which of several GPUs the engines get, so engines that fit on the largest one are accepted.

    Raises:
        ConfigError: if engines that have to be awake together do not fit.
    """
    gpus = memory_by_nvidia_smi()
    crowded = what_is_crowded(seats, phases, max(gpus)) if gpus else []
    if crowded:
        raise ConfigError("\n".join(crowded))
