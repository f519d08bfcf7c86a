"""Terminal output of the launcher and the quickstart: the output of the programs that they run, and waiting times."""

import os
import re
import sys
import termios
import threading
import time
from contextlib import suppress

_SECONDS_BETWEEN_LINES = 15.0
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Echo(threading.Thread):
    """A thread that copies a program's output to standard output and into a log.

    The program writes to `write_end`. If standard output is a terminal, `write_end` is a pseudo-terminal of the same
    size, so that the program shows progress bars; otherwise it is a pipe. The log gets complete lines; of a line that
    was rewritten in place (a progress bar), it gets the last state.
    """

    def __init__(self, log: int):
        super().__init__(daemon=True, name="echo")
        self._log = os.fdopen(os.dup(log), "wb", buffering=0)
        self._read_end, self.write_end = _open_terminal() if sys.stdout.isatty() else os.pipe()
        self._line = b""
        self._muted = False

    def start(self) -> None:
        """Start copying. Call it after the program was started, because it closes this process's copy of the write end:
        otherwise `run` would never see the end of the output."""
        os.close(self.write_end)
        super().start()

    def run(self) -> None:
        """Copy until all copies of the write end are closed."""
        while chunk := self._read():
            with suppress(OSError):  # the terminal was closed; keep writing the log
                if not self._muted:
                    os.write(sys.stdout.fileno(), chunk)
            self._log_lines(chunk)
        if self._line:
            self._log.write(self._line + b"\n")
        self._log.close()

    def mute(self) -> None:
        """Copy only into the log from now on."""
        self._muted = True

    def finish(self) -> None:
        """Wait up to five seconds until everything is copied."""
        self.join(timeout=5.0)

    def _read(self) -> bytes:
        try:
            return os.read(self._read_end, 65536)
        except OSError:  # a pseudo-terminal whose other end is closed
            return b""

    def _log_lines(self, chunk: bytes) -> None:
        *complete, self._line = (self._line + chunk).split(b"\n")
        for line in complete:
            self._log.write(_ESCAPES.sub(b"", line.rstrip(b"\r").rsplit(b"\r")[-1]) + b"\n")


def _open_terminal() -> tuple[int, int]:
    """A pseudo-terminal of the same size as standard output's terminal, as its read end and its write end."""
    read_end, write_end = os.openpty()
    termios.tcsetwinsize(write_end, termios.tcgetwinsize(sys.stdout.fileno()))
    attributes = termios.tcgetattr(write_end)
    attributes[1] &= ~termios.OPOST  # only the real terminal translates newlines
    termios.tcsetattr(write_end, termios.TCSANOW, attributes)
    return read_end, write_end


class Waiting:
    """Shows how long a wait has lasted: as one updated line on a terminal, otherwise as a new line every 15 seconds."""

    def __init__(self, label: str, limit_s: float):
        self._label, self._limit_s = label, limit_s
        self._started = self._shown = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._started

    def show(self) -> None:
        """Update the display. Call it repeatedly while waiting."""
        text = f"{self._label}: {self.seconds:.0f} s (at most {self._limit_s:.0f} s)"
        if sys.stdout.isatty():
            print(f"\r{text}", end="", flush=True)
        elif time.monotonic() - self._shown > _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            print(text, flush=True)

    def done(self) -> None:
        """Remove the line from the terminal."""
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)
