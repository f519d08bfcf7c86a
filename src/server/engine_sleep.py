"""Which engines of a server are awake. All of them sleep while a trainer uses their GPU, and no longer than that
trainer lives; else those are awake that are wanted: all, or with `generation.schedule: phased` those of the present
phase."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import psutil

from src.errors import ClassroomError
from src.server.schemas import ProcessId

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
        wanted: the seats whose engines are to be awake at first; None means all.
    """

    def __init__(self, engines: Mapping[str, Sleeper], timeout_s: float, wanted: Collection[str] | None = None):
        self._engines = engines
        self._timeout_s = timeout_s
        self._wanted = [seat for seat in engines if wanted is None or seat in wanted]
        self._lent = False
        self._changes = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def lend(self, borrowers: Sequence[ProcessId]) -> None:
        """Put all engines to sleep, until they are woken or all of the borrowers are gone.

        Raises:
            DeadlineExceeded: if turns are still in flight after the timeout; the wanted engines are awake then.
            EngineFailure: if an engine died.
        """
        async with self._changes:
            self._end_watch()
            try:
                await self._sleep(self._engines)
            except BaseException:
                await self._wake_wanted()
                raise
            self._lent = True
            here = [each for each in borrowers if each.host == socket.gethostname()]  # the others cannot be watched
            self._watch = asyncio.create_task(self._wake_when_gone(here or borrowers))

    async def take_back(self) -> None:
        """Wake the engines that are wanted; nothing happens to those that are awake.

        Raises:
            EngineFailure: if an engine died.
        """
        async with self._changes:
            self._end_watch()
            await self._give_back()

    async def turn_to(self, seats: Collection[str]) -> None:
        """Have the engines of these seats awake and the others asleep, at once or when the trainer has given the GPUs
        back. Where none of the seats has an engine here, everything stays as it is.

        Raises:
            DeadlineExceeded: if turns of an engine that has to sleep are still in flight after the timeout.
            EngineFailure: if an engine died.
        """
        wanted = [seat for seat in self._engines if seat in seats]
        if not wanted:
            return
        async with self._changes:
            self._wanted = wanted
            if not self._lent:
                await self._wake_wanted()

    @asynccontextmanager
    async def loading(self, seat: str) -> AsyncIterator[None]:
        """Inside, the engine of this seat has room to load weights, also if it is not wanted at present; it then sleeps
        again."""
        async with self._changes:
            unwanted = seat in self._engines and seat not in self._wanted
            if unwanted and not self._lent:
                await self._sleep(self._wanted)
            try:
                yield
            finally:
                if unwanted:
                    await self._sleep([seat])
                if unwanted and not self._lent:
                    await self._wake_wanted()

    def close(self) -> None:
        """Leave the engines as they are, for good."""
        self._end_watch()

    async def _give_back(self) -> None:
        await self._wake_wanted()
        self._lent = False

    async def _wake_wanted(self) -> None:
        await self._sleep([seat for seat in self._engines if seat not in self._wanted])
        for seat in self._wanted:
            await self._engines[seat].wake_up()

    async def _sleep(self, seats: Collection[str]) -> None:
        asleep = await asyncio.gather(
            *(self._engines[seat].sleep(self._timeout_s) for seat in seats), return_exceptions=True
        )
        for failure in (each for each in asleep if each is not None):
            raise failure

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
                    await self._give_back()
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
