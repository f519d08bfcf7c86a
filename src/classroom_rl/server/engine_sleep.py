"""Controls which engines of a server sleep. While a running trainer uses their GPU, all of them sleep. Otherwise all
are awake, or with `generation.schedule: phased` those of the current phase.
"""

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

from classroom_rl.errors import ClassroomError, ConfigError, DeadlineExceeded
from classroom_rl.server.schemas import ProcessId
from classroom_rl.system.run_lock import is_claimed
from classroom_rl.system.storage import storage_errors, write_whole

logger = logging.getLogger(__name__)


_SECONDS_BETWEEN_LEASE_CHECKS = 0.5
_SECONDS_BETWEEN_MESSAGES = 30.0


class GpuLease:
    """The trainer's lease on the GPUs of one server, kept in a file of the run folder.

    A server does not remember that its engines slept when its process ends. If it dies during a training step and is
    started again, there would be no room on the GPU, or it would take the memory that the trainer needs. So the trainer
    writes the file once the engines sleep and removes it when it has freed the GPU; a server loads no model before
    that. A trainer that died holds no lease, whatever the file says.

    Args:
        run_folder: the folder that server and trainer share.
        server_index: the server's position in `generation.server_urls`.
    """

    def __init__(self, run_folder: Path, server_index: int = 0):
        self._run_folder = run_folder
        self._path = run_folder / (f"gpu_lease.{server_index}.json" if server_index else "gpu_lease.json")

    def take(self, trainer: Sequence[ProcessId]) -> None:
        """Record that these processes use the GPUs from now on. Raises a `StorageError` if it cannot be written."""
        write_whole(self._path, json.dumps([process.model_dump() for process in trainer]))

    def end(self) -> None:
        """End the lease: the GPUs have room for the engines again. Raises a `StorageError` if the file cannot be
        removed."""
        with storage_errors(self._path):
            self._path.unlink(missing_ok=True)

    def holders(self) -> list[ProcessId]:
        """Return the processes of a running trainer that use the GPUs; empty if the engines have room. Raises a
        `ConfigError` if the file is damaged."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        try:
            recorded = [ProcessId.model_validate(process) for process in json.loads(text)]
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._path} is damaged and does not say which processes of a trainer use the GPUs. Remove it if no "
                "trainer runs."
            ) from error
        if not is_claimed("train_rl", self._run_folder):
            return []  # also if the trainer ran on another machine, or in a container that ended
        return [process for process in recorded if is_alive(process)]

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the trainer has made room or has ended. Raises a `DeadlineExceeded` if neither happened within
        `timeout_s` seconds."""
        started, logged = time.monotonic(), None
        while holders := self.holders():
            now = time.monotonic()
            pids = ", ".join(f"{process.pid} on {process.host}" for process in holders)
            if now - started > timeout_s:
                raise DeadlineExceeded(
                    f"The trainer (process {pids}) has not made room on the GPU within generation.sample_timeout_s = "
                    f"{timeout_s:g} s, so no engine was loaded. Its log is trainer.log in {self._run_folder}; if it "
                    "hangs, end it; then start the server again."
                )
            if logged is None or now - logged >= _SECONDS_BETWEEN_MESSAGES:
                logger.info(
                    "the trainer (process %s) uses the GPU: the engines are loaded when it makes room (%.0f s, at most "
                    "%.0f s)",
                    pids,
                    now - started,
                    timeout_s,
                )
                logged = now
            time.sleep(_SECONDS_BETWEEN_LEASE_CHECKS)


_SECONDS_BETWEEN_TRAINER_CHECKS = 1.0
_START_TIME_TOLERANCE_S = 2.0
"""Two programs may read start times of one process that differ by this much, because the system clock was adjusted."""


class Sleeper(Protocol):
    """An engine that can be put to sleep."""

    async def sleep(self, timeout_s: float) -> None: ...

    async def wake_up(self) -> None: ...


class EngineSleep:
    """Puts the engines of a server to sleep and wakes them.

    Args:
        engines: by role.
        timeout_s: how long an engine that has to sleep waits for its turns in flight, in seconds.
        wanted: the roles whose engines are awake when no trainer uses the GPUs; None means all. `wake_only` changes it.
    """

    def __init__(self, engines: Mapping[str, Sleeper], timeout_s: float, wanted: Collection[str] | None = None):
        self._engines = engines
        self._timeout_s = timeout_s
        self._wanted = [role for role in engines if wanted is None or role in wanted]
        self._trainer_has_gpus = False
        self._changes = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def sleep(self, trainer: Sequence[ProcessId]) -> None:
        """Put all engines to sleep, until `wake_up` or until all processes of the trainer have ended.

        Raises:
            DeadlineExceeded: if turns are still in flight after the timeout; the wanted engines are awake then.
            EngineFailure: if an engine died.
        """
        async with self._changes:
            self._end_watch()
            try:
                await self._put_to_sleep(self._engines)
            except BaseException:  # also a cancellation: never leave only some of the engines asleep
                await self._wake_wanted()
                raise
            self._trainer_has_gpus = True
            local = [process for process in trainer if process.host == socket.gethostname()]
            # Processes on other hosts cannot be watched and count as alive: without a local one, only `wake_up` wakes.
            self._watch = asyncio.create_task(self._wake_after(local or trainer))

    async def wake_up(self) -> None:
        """Wake the wanted engines. Engines that are awake already stay as they are. Raises an `EngineFailure` if an
        engine died."""
        async with self._changes:
            self._end_watch()
            await self._end_sleep()

    async def wake_only(self, roles: Collection[str]) -> None:
        """Wake the engines of these roles and put the others to sleep: at once, or in the next `wake_up` if a trainer
        uses the GPUs. If none of the roles has an engine here, nothing changes. Raises as `sleep` does."""
        wanted = [role for role in self._engines if role in roles]
        if not wanted:
            return
        async with self._changes:
            self._wanted = wanted
            if not self._trainer_has_gpus:
                await self._wake_wanted()

    @asynccontextmanager
    async def room_for_loading(self, role: str) -> AsyncIterator[None]:
        """While the context is open, the engine of this role has room on the GPU to load weights. If it is not one of
        the wanted engines, these sleep meanwhile; afterwards it sleeps again and they wake."""
        async with self._changes:
            unwanted = role in self._engines and role not in self._wanted
            if unwanted and not self._trainer_has_gpus:
                await self._put_to_sleep(self._wanted)
            try:
                yield
            finally:
                if unwanted:
                    await self._put_to_sleep([role])
                if unwanted and not self._trainer_has_gpus:
                    await self._wake_wanted()

    def close(self) -> None:
        """Stop watching the trainer's processes; the engines stay as they are."""
        self._end_watch()

    async def _end_sleep(self) -> None:
        await self._wake_wanted()
        self._trainer_has_gpus = False

    async def _wake_wanted(self) -> None:
        # First sleep, then wake: otherwise the GPU may not have room for both groups.
        await self._put_to_sleep([role for role in self._engines if role not in self._wanted])
        for role in self._wanted:
            await self._engines[role].wake_up()

    async def _put_to_sleep(self, roles: Collection[str]) -> None:
        results = await asyncio.gather(
            *(self._engines[role].sleep(self._timeout_s) for role in roles), return_exceptions=True
        )
        failures = [result for result in results if result is not None]
        for failure in failures[1:]:
            logger.error("another engine did not fall asleep: %s", failure)
        if failures:
            raise failures[0]

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _wake_after(self, trainer: Sequence[ProcessId]) -> None:
        """Wake the engines once all of these processes have ended."""
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_TRAINER_CHECKS)
            if any(is_alive(process) for process in trainer):
                continue
            pids = ", ".join(str(process.pid) for process in trainer)
            logger.warning("the trainer (process %s) is gone and left the engines asleep: they wake", pids)
            try:
                async with self._changes:
                    await self._end_sleep()
                return
            except ClassroomError as failure:  # the trainer's memory may not be free yet: try again
                logger.error("%s", failure)
            except Exception:  # nothing awaits this task, so log the error here
                logger.exception("the engines cannot be woken after the trainer has ended")
                raise


def this_process() -> ProcessId:
    """Return the id of the calling process."""
    return ProcessId(host=socket.gethostname(), pid=os.getpid(), started=psutil.Process().create_time())


def is_alive(process: ProcessId) -> bool:
    """Whether a process still runs. A process on another host, or in a container with another hostname, cannot be
    checked and counts as running."""
    if process.host != socket.gethostname():
        return True
    with suppress(psutil.NoSuchProcess):
        current = psutil.Process(process.pid)
        is_same = abs(current.create_time() - process.started) < _START_TIME_TOLERANCE_S
        return is_same and current.status() != psutil.STATUS_ZOMBIE
    return False
