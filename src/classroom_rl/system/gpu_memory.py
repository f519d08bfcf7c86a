"""Measures the memory in use on a GPU or on the host, and its peak over time (two samples per second)."""

import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import psutil

from classroom_rl.errors import ClassroomError

_SECONDS_BETWEEN_SAMPLES = 0.5


class MemoryWatch:
    """Samples memory use in a background thread, inside its `with` block.

    Args:
        used: returns the bytes in use.
        every_s: seconds between samples.

    Attributes:
        samples: the time of each sample (as of `time.time()`), and the bytes in use.
    """

    def __init__(self, used: Callable[[], int], every_s: float = _SECONDS_BETWEEN_SAMPLES):
        self._used, self._every_s = used, every_s
        self.samples: list[tuple[float, int]] = []
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="memory watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def peak(self, first: float = float("-inf"), last: float = float("inf")) -> int:
        """The largest sample, in bytes, between two times (as of `time.time()`). If there is none, the last sample
        before `first`; 0 without any.

        Raises:
            Exception: the error that `used` raised, if a sample failed.
        """
        if self._failure is not None:
            raise self._failure
        in_range = [used for timestamp, used in self.samples if first <= timestamp <= last]
        before = [used for timestamp, used in self.samples if timestamp < first]
        return max(in_range, default=before[-1] if before else 0)

    def _sample(self) -> None:
        try:
            while not self._stop.is_set():
                self.samples.append((time.time(), self._used()))
                self._stop.wait(self._every_s)
        except Exception as failure:  # raised by `peak`, in the caller's thread
            self._failure = failure


def gpu_memory_used(index: int) -> int:
    """The bytes in use on a GPU, by all programs together.

    Raises:
        ClassroomError: if nvidia-smi fails or reports no number.
    """
    command = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClassroomError(f"nvidia-smi does not say how much memory is in use: {error}") from error
    if result.returncode or not result.stdout.strip().isdigit():
        output = (result.stdout + result.stderr)[:300]
        raise ClassroomError(f"nvidia-smi does not say how much memory is in use: {output}")
    return int(result.stdout) << 20  # nvidia-smi reports MiB


def process_memory() -> int:
    """The bytes of host memory (resident set size) that this process's descendants use."""
    total = 0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total
