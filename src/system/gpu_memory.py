"""How much memory is in use over a stretch of time, looked at from outside twice a second."""

import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import psutil

from src.errors import ClassroomError

_SECONDS_BETWEEN_LOOKS = 0.5


class MemoryWatch:
    """Looks at a memory for as long as it is entered.

    Args:
        used: reads how many bytes are in use.
    """

    def __init__(self, used: Callable[[], int], every_s: float = _SECONDS_BETWEEN_LOOKS):
        self._used, self._every_s = used, every_s
        self._looks: list[tuple[float, int]] = []
        self._failure: ClassroomError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="memory watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def peak(self, first: float = float("-inf"), last: float = float("inf")) -> int:
        """The most bytes that were seen between two moments (as time.time() counts); of a stretch without a look, what
        was seen at the look before it. 0 if there was none.

        Raises:
            ClassroomError: if a look failed.
        """
        if self._failure is not None:
            raise self._failure
        inside = [used for moment, used in self._looks if first <= moment <= last]
        before = [used for moment, used in self._looks if moment < first]
        return max(inside, default=before[-1] if before else 0)

    def _look(self) -> None:
        try:
            while not self._over.is_set():
                self._looks.append((time.time(), self._used()))
                self._over.wait(self._every_s)
        except ClassroomError as failure:
            self._failure = failure


def gpu_memory_used(index: int) -> int:
    """Bytes in use on a GPU, by all programs.

    Raises:
        ClassroomError: if nvidia-smi does not say.
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
    """Bytes of the host's memory that this process's descendants have."""
    total = 0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total
