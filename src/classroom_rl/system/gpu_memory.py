"""Measures memory in use on a GPU or on the host, and its peak over time from two samples a second."""

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
    """

    def __init__(self, used: Callable[[], int], every_s: float = _SECONDS_BETWEEN_SAMPLES):
        self._used, self._every_s = used, every_s
        self._samples: list[tuple[float, int]] = []
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
        """The largest sample in bytes between two times (as of `time.time()`). Without a sample between them, the last
        sample before; 0 if there is none.

        Raises:
            Exception: the error of `used`, if a sample failed.
        """
        if self._failure is not None:
            raise self._failure
        inside = [used for moment, used in self._samples if first <= moment <= last]
        before = [used for moment, used in self._samples if moment < first]
        return max(inside, default=before[-1] if before else 0)

    def _sample(self) -> None:
        try:
            while not self._stop.is_set():
                self._samples.append((time.time(), self._used()))
                self._stop.wait(self._every_s)
        except Exception as failure:  # `peak` raises it
            self._failure = failure


def gpu_memory_used(index: int) -> int:
    """The bytes that all programs together use on a GPU.

    Raises:
        ClassroomError: if nvidia-smi fails or does not tell.
    """
    command = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClassroomError(f"nvidia-smi does not say how much memory is in use: {error}") from error
    if done.returncode or not done.stdout.strip().isdigit():
        raise ClassroomError(f"nvidia-smi does not say how much memory is in use: {(done.stdout + done.stderr)[:300]}")
    return int(done.stdout) << 20


def process_memory() -> int:
    """The bytes of host memory (resident set size) that this process's descendants use."""
    total = 0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total
