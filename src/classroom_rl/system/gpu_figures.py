"""What a GPU is busy with, by NVML, and how fast it could compute: for the metrics of a training."""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

_PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("RTX 4090", 165.2),
    ("L4", 121.0),
)
"""Dense operations in bfloat16 (and float16) by whole words of the GPU's name, in 10¹² a second, from NVIDIA's data
sheets; the first words that a name holds count."""


def peak_flops(name: str) -> float | None:
    """Return a GPU's dense operations per second in 16 bits; None if they are not known here.

    Args:
        name: as `torch.cuda.get_device_name` gives it.
    """
    return next((1e12 * tflops for part, tflops in _PEAK_TFLOPS if re.search(rf"\b{part}\b", name)), None)


def training_flops(parameters: int, has_adapter: bool = False) -> int:
    """Return the operations for each token that is trained on, as for the MFU in PaLM's paper: 2 for each parameter in
    the forward pass, 2 for the gradient of what it reads, and 2 for its own gradient, which weights beside an adapter
    have not. Attention, and what is computed a second time for checkpointing, do not count."""
    return (4 if has_adapter else 6) * parameters


@dataclass(frozen=True)
class GpuUsage:
    """What a GPU is used for by all programs together: bytes, and the share of the last second in which it computed.
    None is not told by this GPU."""

    index: int
    memory_used: int | None
    memory: int
    utilization: float | None


def gpu_usage() -> Iterator[GpuUsage]:
    """Ask NVML about all GPUs that this process sees; none without a GPU, or without the package nvidia-ml-py. No CUDA
    context is created on them."""
    import torch

    nvml = sys.modules.get("pynvml")  # torch imports it where it is installed
    if nvml is None or not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        memory_used = utilization = None
        with suppress(nvml.NVMLError):  # parts of a GPU (MIG) have no utilisation
            memory_used = torch.cuda.device_memory_used(index)
            utilization = torch.cuda.utilization(index) / 100
        yield GpuUsage(index, memory_used, torch.cuda.get_device_properties(index).total_memory, utilization)
