"""Notices for how long an event loop answers nobody, and what it does meanwhile."""

import asyncio
import gc
import sys
import threading
import time
import traceback
from pathlib import Path

_BEAT_S = 0.005
_LATE_S = 0.02
_ROOT = Path(__file__).resolve().parents[1]


class LoopWatch:
    """Measures the blocks of the event loop that `beat` runs in. A thread looks at its stack when a beat is late.

    Attributes:
        blocks: each block of more than 20 ms since the last `reset`: its seconds by the clock, the loop's own seconds
            of CPU time in it, and the innermost line of this project that the loop was in most of the times that the
            thread looked. What holds the interpreter's lock, as a parser does, is seen at the line after it. On a busy
            machine a loop is late without having done anything: then the CPU time is short.
    """

    def __init__(self) -> None:
        self._due = float("inf")
        self._thread = 0
        self.reset()
        gc.callbacks.append(self._collecting)
        threading.Thread(target=self._look, name="loop watch", daemon=True).start()

    def reset(self) -> None:
        """Forget what was noticed so far."""
        self.blocks: list[tuple[float, float, str]] = []
        self._seen: list[str] = []

    @property
    def longest(self) -> tuple[float, float, str]:
        """The block with the most CPU time."""
        return max(self.blocks, key=lambda block: block[1], default=(0.0, 0.0, ""))

    async def beat(self) -> None:
        """Beat until cancelled."""
        self._thread = threading.get_ident()
        while True:
            self._due, before = time.perf_counter() + _BEAT_S, time.thread_time()
            await asyncio.sleep(_BEAT_S)
            late = time.perf_counter() - self._due
            seen, self._seen = self._seen, []
            if late > _LATE_S:
                used = time.thread_time() - before
                self.blocks.append((late, used, max(sorted(set(seen)), key=seen.count, default="")))

    def _look(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            if time.perf_counter() - self._due > _LATE_S:
                stack = traceback.extract_stack(sys._current_frames()[self._thread])
                self._seen.append(_place(stack))

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection = time.perf_counter()
        elif threading.get_ident() == self._thread and time.perf_counter() - self._collection > _LATE_S:
            self._seen += [f"garbage collection of generation {info['generation']}"] * 1000


def _place(stack: traceback.StackSummary) -> str:
    """The innermost line of a stack that is in this project, and what it calls."""
    frames = [frame for frame in stack if Path(frame.filename).is_relative_to(_ROOT) and ".venv" not in frame.filename]
    inner = f" → {Path(stack[-1].filename).name}:{stack[-1].name}" if not frames or frames[-1] is not stack[-1] else ""
    if not frames:
        return inner.removeprefix(" → ")
    return f"{Path(frames[-1].filename).relative_to(_ROOT)}:{frames[-1].lineno} {frames[-1].name}{inner}"
