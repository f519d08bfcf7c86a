"""Runs the classroom server as a child process: starts it, waits for it, restarts it, stops it."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from classroom_rl.config.base import GenerationConfig
from classroom_rl.errors import DeadlineExceeded, EngineFailure
from classroom_rl.server.client import ClassroomClient, server_url
from classroom_rl.server.schemas import Health
from classroom_rl.system.processes import Child, Signals, refuse_taken_port
from classroom_rl.system.terminal import Waiting

_PAUSE_S = 0.3
_GRACE_WHILE_LOADING_S = 3.0
_RESTARTS = 3


class ServerProcess(Child):
    """A server that this program started, at the address in `generation`; other arguments as for `Child`. Raises a
    `ConfigError` if its port is taken; the message names the process that uses it."""

    def __init__(
        self,
        command: Sequence[str],
        generation: GenerationConfig,
        signals: Signals,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ):
        refuse_taken_port(generation.server_host, generation.server_port)
        self.url = server_url(generation)
        self._limit_s = generation.server_start_timeout_s
        super().__init__("the server", command, signals, log, grace_s=_GRACE_WHILE_LOADING_S, environment=environment)

    def wait_until_ready(self) -> Health:
        """Wait until the server has loaded its models.

        Raises:
            EngineFailure: if the server ended; the message contains the last lines of its log.
            DeadlineExceeded: after `generation.server_start_timeout_s` seconds.
            Interrupted: on a signal.
        """
        client = ClassroomClient(self.url, log=self.log)
        waiting = Waiting(f"the server is loading its models, log {self.log}", self._limit_s)
        try:
            while True:
                self._signals.check()
                self.check_alive()
                try:
                    health = client.health()
                except DeadlineExceeded:
                    if waiting.seconds > self._limit_s:
                        raise self._timeout_error() from None
                else:
                    self.grace_s = Child.GRACE_S  # a running server needs longer to shut down than a loading one
                    return health
                waiting.show()
                time.sleep(_PAUSE_S)
        finally:
            waiting.done()

    def check_alive(self) -> None:
        """Check that the server still runs. Raises an `EngineFailure` if the server ended; the message contains the
        last lines of its log."""
        status = self.poll()
        if status is not None:
            raise EngineFailure(
                f"The server ended with status {status}. The last lines of {self.log}:\n{self.last_lines()}"
            )

    def _timeout_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"The server did not answer at {self.url} within generation.server_start_timeout_s = {self._limit_s:g} s. "
            f"The last lines of {self.log}:\n{self.last_lines()}"
        )


class SupervisedServer:
    """A server that is restarted if it ends too early. The new process continues the work of the old one.

    Args:
        start: starts the server.
        progress: returns a number that grows as the training advances. After `_RESTARTS` restarts without growth, the
            server is not restarted again.
    """

    def __init__(self, start: Callable[[], ServerProcess], progress: Callable[[], int]):
        self._start, self._progress = start, progress
        self._last_progress, self._restarts = progress(), 0
        self.process = start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()

    def restart_if_ended(self) -> None:
        """Restart the server if it ended. Raises an `EngineFailure` if it ended too often; the message contains the
        last lines of its log."""
        status = self.process.poll()
        if status is None:
            return
        progress = self._progress()
        # Progress since the last restart begins the count anew.
        self._restarts = 1 if progress > self._last_progress else self._restarts + 1
        self._last_progress = progress
        if self._restarts > _RESTARTS:
            self.process.check_alive()  # raises
        self.process.stop()
        print(
            f"The server ended with status {status} and is started again ({self._restarts} of at most {_RESTARTS} "
            f"times without progress in between); its log is {self.process.log}.",
            file=sys.stderr,
            flush=True,
        )
        self.process = self._start()
