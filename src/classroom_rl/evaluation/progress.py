"""The progress display of an evaluation, and concurrent requests that stop at the first failure."""

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Optional, Self, TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def gather_or_stop(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    Unlike with `asyncio.gather`, the first error cancels the rest. It is raised itself, not in an exception group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


SECONDS_BETWEEN_LINES = 10.0


class EvaluationProgress:
    """A context with a progress bar on a terminal; elsewhere with a log line at most every `SECONDS_BETWEEN_LINES`, and
    one at the end. `label` says what is done with the items, and `unit` what they are called."""

    def __init__(self, total: int, label: str, unit: str):
        self._total, self._label, self._unit = total, label, unit
        self._done, self._last_line = 0, time.monotonic()
        self._bar: Optional[tqdm] = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=label, unit=f" {unit}", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def add(self, count: int) -> None:
        """Count this many items as done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._done == self._total or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            logger.info("%s: %d of %d %s", self._label, self._done, self._total, self._unit)
            self._last_line = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
