"""Starting other programs, and ending exactly what was started.

Every program gets a session, and so a process group, of its own. What it starts in turn may move into other groups
(torchrun's workers do) and may outlive its parent. So its descendants are remembered while it runs, and a mark in the
environment, which is handed down, tells those that were missed. Nothing is ever looked up by name.
"""

import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Self
from uuid import uuid4

import psutil

from src.system.terminal import Echo

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_END = 5.0
_MARK = "STARTED_BY_CLASSROOM_AS"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Interrupted(Exception):
    """The user or the system asked this program to end; `status` is the exit status that says so."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.status = 128 + signum


class Signals:
    """Turns SIGINT, SIGTERM and SIGHUP into a request that waits take notice of with `check`.

    A handler that raised could do so between starting a program and remembering that it was started; a request
    cannot. Signals that this program was told to ignore (nohup) stay ignored.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._before: dict[int, Callable[[int, FrameType | None], None] | int | None] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, lambda number, _frame: self._received.append(number))
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raises:
        Interrupted: if a signal came.
        """
        if self._received:
            raise Interrupted(self._received[0])

    @property
    def impatient(self) -> bool:
        """Whether a second signal came: what is left is then killed without a grace time."""
        return len(self._received) > 1


class Child:
    """A running program with everything that it started.

    Args:
        name: for messages.
        command: program and arguments.
        signals: looked at during waits.
        log: file that its output is appended to.
        echo: whether its output goes to this program's standard output, too, as to a terminal if that is one.
        grace_s: how long `stop` waits after SIGTERM.
        environment: variables that it gets besides this program's.
    """

    GRACE_S = 20.0

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        signals: Signals,
        log: Path,
        echo: bool = False,
        grace_s: float = GRACE_S,
        environment: Mapping[str, str] | None = None,
    ):
        self.name, self.log, self.grace_s = name, log, grace_s
        self._signals = signals
        self._others: dict[int, psutil.Process] = {}
        self._looked = 0.0
        self._mark = uuid4().hex
        self._status: int | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self._echo = Echo(file.fileno()) if echo else None
            output = self._echo.write_end if self._echo else file.fileno()
            self._popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Unbuffered, its log is whole when it is killed.
                env={**os.environ, **(environment or {}), _MARK: self._mark, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=_end_with_parent(os.getpid()),
            )
        if self._echo:
            self._echo.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Its process id, which is that of its process group and session, too."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Its exit status as a shell gives it (128 + signal number if a signal ended it), None while it runs.

        It stays a zombie until `stop`, so that its id is not given to another process meanwhile.
        """
        if self._status is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._status = ended.si_status + (0 if ended.si_code == os.CLD_EXITED else 128)
            elif time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS:
                self._look_around()
        return self._status

    def wait(self, check: Callable[[], None] = lambda: None) -> int:
        """Its exit status, once it ended by itself.

        Args:
            check: called again and again; what it raises ends the wait.

        Raises:
            Interrupted: if a signal came.
        """
        while (status := self.poll()) is None:
            self._signals.check()
            check()
            time.sleep(_POLL_S)
        return status

    def stop(self) -> None:
        """End it and all that it started: SIGTERM to itself, so that it can end its own processes in good order;
        SIGTERM to those that are left; SIGKILL. A second signal to this program leaves out the waiting."""
        if self._popen.returncode is not None:
            return
        self._look_around()
        self._remember_marked()
        if self.poll() is None:
            if self._echo:
                self._echo.mute()  # what it says about being ended is for the log
            os.kill(self.pid, signal.SIGTERM)
            self._wait_until(lambda: self.poll() is not None, self.grace_s)
        self._remember_marked()
        self._end(signal.SIGTERM)
        self._end(signal.SIGKILL, spare=_is_resource_tracker)
        self._end(signal.SIGKILL)
        for process in self._left():
            logger.error("process %d of %s does not end, not even by SIGKILL", process.pid, self.name)
        if self.poll() is not None:
            self._popen.wait()
        if self._echo:
            self._echo.finish()

    def last_lines(self, count: int = 20) -> str:
        """The end of what it wrote into its log."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
        return "\n".join(text.rstrip().splitlines()[-count:])

    def _end(self, signum: int, spare: Callable[[psutil.Process], bool] = lambda _: False) -> None:
        self._look_around()
        for process in self._left():
            if not spare(process):
                _send(process, signum)
        self._wait_until(lambda: not self._left(), _SECONDS_TO_END, patient=signum == signal.SIGKILL)

    def _wait_until(self, reached: Callable[[], bool], seconds: float, patient: bool = False) -> None:
        deadline = time.monotonic() + seconds
        while not reached() and time.monotonic() < deadline and (patient or not self._signals.impatient):
            time.sleep(_POLL_S / 4)

    def _look_around(self) -> None:
        """Remember what descends from it or is in its group now, and forget what has ended."""
        self._looked = time.monotonic()
        self._others = {pid: process for pid, process in self._others.items() if _runs(process)}
        running = _running_processes()
        found = {pid for pid, (_, group) in running.items() if group == self.pid} | {self.pid, *self._others}
        while more := {pid for pid, (parent, _) in running.items() if parent in found} - found:
            found |= more
        self._remember(found)

    def _remember_marked(self) -> None:
        """Remember what was started by a part of it that ended before anyone looked."""
        mark = f"{_MARK}={self._mark}".encode()
        for pid in psutil.pids():
            with suppress(OSError):  # ended since the listing, or another user's
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    self._remember({pid})

    def _remember(self, pids: set[int]) -> None:
        for pid in pids - {self.pid, *self._others}:
            with suppress(psutil.NoSuchProcess):
                self._others[pid] = psutil.Process(pid)

    def _left(self) -> list[psutil.Process]:
        """What runs of it: itself and the others that are remembered."""
        itself = [psutil.Process(self.pid)] if self.poll() is None else []
        return itself + [process for process in self._others.values() if _runs(process)]


def _running_processes() -> dict[int, tuple[int, int]]:
    """Of every process on this machine the ids of its parent and of its group."""
    found = {}
    for pid in psutil.pids():
        with suppress(OSError):  # ended since the listing
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found[pid] = int(fields[1]), int(fields[2])
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, signum: int) -> None:
    try:
        process.send_signal(signum)  # looks first whether this is still the process that was remembered
    except psutil.NoSuchProcess:
        return


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Python's helper that removes the shared memory of dead processes; it ends by itself once they are gone."""
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _end_with_parent(parent: int) -> Callable[[], None]:
    """Have the kernel send SIGTERM to the new program when this one is killed and cannot do so itself."""

    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child
