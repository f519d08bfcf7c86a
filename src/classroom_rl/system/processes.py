"""Starts other programs, and ends exactly the processes that they started.

Every program gets its own session, and so its own process group. Its descendants may move into other groups (torchrun's
workers do) and may outlive their parents. So `Child` records descendants while the program runs, and finds those that
it missed by a marker variable in their environment, which processes inherit. It never searches by name.
"""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Self
from uuid import uuid4

import psutil

from classroom_rl.errors import ConfigError
from classroom_rl.system.terminal import Echo

logger = logging.getLogger(__name__)


def refuse_taken_port(host: str, port: int, key: str = "generation.server_port") -> None:
    """Refuse an address at which a program cannot listen.

    Args:
        key: the config key that `port` comes from, for the error message.

    Raises:
        ConfigError: if a process already listens there (the message names it), or the address is not this machine's.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the server itself does: connections of an earlier server in TIME_WAIT do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Nothing can listen on {host}:{port}: {error.strerror}.{_describe_listener(port)} "
                f"End that, or choose another port with {key}=…"
            ) from error


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _describe_listener(port: int) -> str:
    """A sentence that names the process listening on a port; empty if none is found."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            if connection.pid is None:
                return " A process of another user listens there."
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                command = "?"
            return f" Process {connection.pid} listens there: {command[:200]}."
    return ""


_POLL_S = 0.2
_SECONDS_BETWEEN_SCANS = 1.0
_SECONDS_TO_END = 5.0
_MARKER_VARIABLE = "STARTED_BY_CLASSROOM_AS"
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)


class Interrupted(Exception):
    """A signal asked this program to end. `status` is the exit status for it: 128 + the signal's number."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.status = 128 + signum


class Signals:
    """Records SIGINT, SIGTERM and SIGHUP inside its `with` block; waiting code calls `check`, which raises.

    A handler that raised the exception itself could do so between the start of a program and the moment at which it is
    recorded, so nothing would end that program. Signals that this program ignores (nohup) stay ignored.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._previous_handlers: dict[int, Callable[[int, FrameType | None], None] | int | None] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous_handlers[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        self._received.append(signum)

    def check(self) -> None:
        """Raise if a signal came.

        Raises:
            Interrupted: if a signal came.
        """
        if self._received:
            raise Interrupted(self._received[0])

    @property
    def impatient(self) -> bool:
        """Whether a second signal came. `Child.stop` then skips the waiting before SIGKILL."""
        return len(self._received) > 1


class Child:
    """A running program and all processes that it started.

    Args:
        name: for messages.
        command: program and arguments.
        signals: checked while waiting.
        log: file to which its output is appended.
        echo: whether its output also goes to this program's standard output; if that is a terminal, the started
            program sees a terminal, too.
        grace_s: seconds that `stop` waits after SIGTERM.
        environment: variables added to this program's environment.
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
        self._descendants: dict[int, psutil.Process] = {}
        self._last_scan = 0.0
        self._marker = uuid4().hex
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
                # Unbuffered Python output, so that the log is complete even if the program is killed.
                env={**os.environ, **(environment or {}), _MARKER_VARIABLE: self._marker, "PYTHONUNBUFFERED": "1"},
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
        """The program's process id, which is also the id of its process group and session."""
        return self._popen.pid

    def poll(self) -> int | None:
        """The program's exit status as in a shell (128 + signal number if a signal ended it); None while it runs.

        The process stays a zombie until `stop`, so that the system does not reuse its id.
        """
        if self._status is None:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                self._status = result.si_status + (0 if result.si_code == os.CLD_EXITED else 128)
            elif time.monotonic() - self._last_scan > _SECONDS_BETWEEN_SCANS:
                self._scan()
        return self._status

    def wait(self, check: Callable[[], None] = lambda: None) -> int:
        """Wait until the program ends by itself, and return its exit status.

        Args:
            check: called repeatedly; an error that it raises ends the wait.

        Raises:
            Interrupted: if a signal came.
        """
        while (status := self.poll()) is None:
            self._signals.check()
            check()
            time.sleep(_POLL_S)
        return status

    def stop(self) -> None:
        """End the program and all processes that it started.

        The program gets SIGTERM first, so that it can end its own processes in order. Then the remaining processes get
        SIGTERM, and finally SIGKILL. A second signal to this program skips the waiting.
        """
        if self._popen.returncode is not None:
            return
        self._scan()
        self._record_marked()
        if self.poll() is None:
            if self._echo:
                self._echo.mute()  # output during shutdown goes only to the log
            os.kill(self.pid, signal.SIGTERM)
            self._wait_until(lambda: self.poll() is not None, self.grace_s)
        self._record_marked()
        self._end(signal.SIGTERM)
        # Resource trackers last: they remove the shared memory of the killed processes, and then end by themselves.
        self._end(signal.SIGKILL, spare=_is_resource_tracker)
        self._end(signal.SIGKILL)
        for process in self._running():
            logger.error("process %d of %s does not end, not even by SIGKILL", process.pid, self.name)
        if self.poll() is not None:
            self._popen.wait()
        if self._echo:
            self._echo.finish()

    def last_lines(self, count: int = 20) -> str:
        """The last `count` lines of this program's output in the log."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - 64 * 1024))  # not into an earlier program's part
            text = file.read().decode("utf-8", errors="replace")
        return "\n".join(text.rstrip().splitlines()[-count:])

    def _end(self, signum: int, spare: Callable[[psutil.Process], bool] = lambda _: False) -> None:
        self._scan()
        for process in self._running():
            if not spare(process):
                _send(process, signum)
        self._wait_until(lambda: not self._running(), _SECONDS_TO_END, patient=signum == signal.SIGKILL)

    def _wait_until(self, reached: Callable[[], bool], seconds: float, patient: bool = False) -> None:
        deadline = time.monotonic() + seconds
        while not reached() and time.monotonic() < deadline and (patient or not self._signals.impatient):
            time.sleep(_POLL_S / 4)

    def _scan(self) -> None:
        """Record all processes that now descend from the program or are in its group, and drop those that ended."""
        self._last_scan = time.monotonic()
        self._descendants = {pid: process for pid, process in self._descendants.items() if _runs(process)}
        running = _running_processes()
        pids = {pid for pid, (_, group) in running.items() if group == self.pid} | {self.pid, *self._descendants}
        while children := {pid for pid, (parent, _) in running.items() if parent in pids} - pids:
            pids |= children
        self._record(pids)

    def _record_marked(self) -> None:
        """Record processes whose parent ended before `_scan` saw it: they have the marker in their environment."""
        marker = f"{_MARKER_VARIABLE}={self._marker}".encode()
        for pid in psutil.pids():
            with suppress(OSError):  # the process has ended, or belongs to another user
                if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    self._record({pid})

    def _record(self, pids: set[int]) -> None:
        for pid in pids - {self.pid, *self._descendants}:
            with suppress(psutil.NoSuchProcess):
                self._descendants[pid] = psutil.Process(pid)

    def _running(self) -> list[psutil.Process]:
        """The processes that still run: the program itself and its recorded descendants."""
        program = [psutil.Process(self.pid)] if self.poll() is None else []
        return program + [process for process in self._descendants.values() if _runs(process)]


def _running_processes() -> dict[int, tuple[int, int]]:
    """The ids of the parent and of the process group of every process on this machine."""
    processes = {}
    for pid in psutil.pids():
        with suppress(OSError):  # the process has ended
            # The fields after the program's name, which stands in parentheses and may contain any character.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            processes[pid] = int(fields[1]), int(fields[2])
    return processes


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, signum: int) -> None:
    try:
        process.send_signal(signum)  # psutil checks first that the id still belongs to the same process
    except psutil.NoSuchProcess:
        return


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether this is Python's resource tracker, which removes the shared memory of dead processes and then ends."""
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def end_with_accelerate() -> None:
    """Have the kernel end this program with `accelerate launch`, if that started it: a launcher that is killed leaves
    its program behind, which would go on training and publishing."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # every launch sets it
        _end_with_parent(os.getppid())()


def _end_with_parent(parent: int) -> Callable[[], None]:
    """A `preexec_fn` that makes the kernel send SIGTERM to the new program when this one dies, even if it is killed."""

    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # this program died before prctl took effect
            os._exit(1)

    return in_child
