"""The watch over the memory in use: it samples again and again, and a failed sample is no peak of nothing."""

import subprocess
import time

import pytest

from classroom_rl.errors import ClassroomError
from classroom_rl.system.gpu_memory import MemoryWatch, gpu_memory_used, process_memory


def test_the_peak_is_the_largest_sample_between_two_times_or_the_last_one_before() -> None:
    readings = iter([1, 7, 3, *[2] * 10_000])
    with MemoryWatch(lambda: next(readings), every_s=0.001) as watch:
        while watch.peak() < 7:
            time.sleep(0.001)
    assert watch.peak() == 7
    watch.samples = [(1.0, 5), (2.0, 4), (9.0, 6)]
    assert (watch.peak(3.0, 8.0), watch.peak(0.0, 0.5), watch.peak(8.0)) == (4, 0, 6)


def test_an_error_of_a_sample_reaches_the_one_who_asks_for_the_peak() -> None:
    with MemoryWatch(lambda: 1 // 0) as watch:
        pass
    with pytest.raises(ZeroDivisionError):
        watch.peak()


def test_nvidia_smi_says_how_much_is_in_use(gpus) -> None:
    gpus(1)
    assert gpu_memory_used(0) == 3 << 20
    with pytest.raises(ClassroomError, match="nvidia-smi does not say how much memory is in use"):
        gpu_memory_used(1)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("nvidia-smi"), "nvidia-smi"),
        (subprocess.TimeoutExpired("nvidia-smi", 30), "after 30 seconds"),
    ],
)
def test_an_nvidia_smi_that_is_missing_or_hangs_is_an_error(error, words, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("subprocess.run", fail)
    with pytest.raises(ClassroomError, match=f"does not say how much memory is in use: .*{words}"):
        gpu_memory_used(0)


def test_the_memory_of_all_started_processes_counts() -> None:
    before = process_memory()
    process = subprocess.Popen(["sleep", "600"])
    try:
        assert process_memory() > before
    finally:
        process.kill()
        process.wait()
