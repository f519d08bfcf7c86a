"""The speed of GPUs by their names, the operations of training, and what NVML says of the GPUs that a process sees."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from classroom_rl.system.gpu_figures import GpuUsage, gpu_usage, peak_flops, training_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
    ],
)
def test_the_speed_of_a_gpu_by_the_name_that_torch_gives(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else pytest.approx(1e12 * tflops))


def test_weights_beside_an_adapter_have_no_gradient_of_their_own() -> None:
    assert (training_flops(7), training_flops(7, has_adapter=True)) == (42, 28)


class NVMLError(Exception):
    pass


def not_supported(index: int) -> int:
    raise NVMLError("Not Supported")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, and the package nvidia-ml-py."""
    nvml = ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda index: 10 + index)
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: 25 * (index + 1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80))


def test_every_gpu_that_is_seen_is_asked_about(two_gpus: None) -> None:
    assert list(gpu_usage()) == [GpuUsage(0, 10, 80, 0.25), GpuUsage(1, 11, 80, 0.5)]


def test_a_part_of_a_gpu_has_no_utilisation(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", not_supported)
    assert list(gpu_usage()) == [GpuUsage(0, 10, 80, None), GpuUsage(1, 11, 80, None)]


def test_nothing_is_told_without_the_package_or_without_a_gpu(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(gpu_usage()) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "pynvml")
    assert list(gpu_usage()) == []
