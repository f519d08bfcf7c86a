"""The server's side of GPUs that it shares with a trainer: its engines sleep while the trainer uses them, and no longer
than that trainer lives."""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import psutil

from src.api import ProcessId
from src.errors import ClassroomError

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 1.0
_SAME_START_S = 2.0
"""Two programs may read a process's start with the system's clock set a little differently."""


class Sleeper(Protocol):
    """An engine that can be put to sleep."""

    async def sleep(self, timeout_s: float) -> None: ...

    async def wake_up(self) -> None: ...


class GpuLoan:
    """Lends the GPUs of all engines to a trainer, and takes them back.

    Args:
        engines: by seat.
        timeout_s: how long turns in flight are waited for.
    """

    def __init__(self, engines: Mapping[str, Sleeper], timeout_s: float):
        self._engines = engines
        self._timeout_s = timeout_s
        self._changes = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def lend(self, borrowers: Sequence[ProcessId]) -> None:
        """Put all engines to sleep, until they are woken or all of the borrowers are gone.

        Raises:
            DeadlineExceeded: if turns are still in flight after the timeout; all engines are awake then.
            EngineFailure: if an engine died.
        """
        async with self._changes:
            self._end_watch()
            asleep = await asyncio.gather(
                *(engine.sleep(self._timeout_s) for engine in self._engines.values()), return_exceptions=True
            )
            failures = [failure for failure in asleep if failure is not None]
            if failures:
                await self._wake_all()
                raise failures[0]
            self._watch = asyncio.create_task(self._wake_when_gone(borrowers))

    async def take_back(self) -> None:
        """Wake all engines; nothing happens to those that are awake.

        Raises:
            EngineFailure: if an engine died.
        """
        async with self._changes:
            self._end_watch()
            await self._wake_all()

    def close(self) -> None:
        """Leave the engines as they are, for good."""
        self._end_watch()

    async def _wake_all(self) -> None:
        for engine in self._engines.values():
            await engine.wake_up()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _wake_when_gone(self, borrowers: Sequence[ProcessId]) -> None:
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            if any(is_alive(each) for each in borrowers):
                continue
            pids = ", ".join(str(each.pid) for each in borrowers)
            logger.warning("the trainer (process %s) is gone and left the engines asleep: they wake", pids)
            try:
                async with self._changes:
                    await self._wake_all()
                return
            except ClassroomError as failure:  # its memory may not be free yet
                logger.error("%s", failure)


def this_process() -> ProcessId:
    """The process that asks."""
    own = psutil.Process()
    return ProcessId(host=socket.gethostname(), pid=os.getpid(), started=own.create_time())


def is_alive(process: ProcessId) -> bool:
    """Whether a process still runs. One on another machine, or in a container with a name of its own, cannot be looked
    at and counts as running."""
    if process.host != socket.gethostname():
        return True
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid)
        same = abs(found.create_time() - process.started) < _SAME_START_S
        return same and found.status() != psutil.STATUS_ZOMBIE
    return False
