"""What the launcher and the quickstart show: the output of the programs that they run, and waits."""

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
    """Copies what a program writes to standard output and into a log.

    The program writes to `write_end`: a terminal of the same size if standard output is one, so that it shows
    progress bars, else a pipe. The log gets whole lines, of a rewritten line its last state.
    """

    def __init__(self, log: int):
        super().__init__(daemon=True, name="echo")
        self._log = os.fdopen(os.dup(log), "wb", buffering=0)
        self._read_end, self.write_end = _terminal_like_ours() if sys.stdout.isatty() else os.pipe()
        self._line = b""
        self._muted = False

    def start(self) -> None:
        """Start copying; the program holds the write end now, this one does not need it any more."""
        os.close(self.write_end)
        super().start()

    def run(self) -> None:
        """Copy until nobody holds the write end."""
        while piece := self._read():
            with suppress(OSError):  # a terminal that was closed is no reason to stop logging
                if not self._muted:
                    os.write(sys.stdout.fileno(), piece)
            self._log_lines(piece)
        if self._line:
            self._log.write(self._line + b"\n")
        self._log.close()

    def mute(self) -> None:
        """From now on copy into the log only."""
        self._muted = True

    def finish(self) -> None:
        """Wait until all is copied."""
        self.join(timeout=5.0)

    def _read(self) -> bytes:
        try:
            return os.read(self._read_end, 65536)
        except OSError:  # how a terminal says that its other end is closed
            return b""

    def _log_lines(self, piece: bytes) -> None:
        *whole, self._line = (self._line + piece).split(b"\n")
        for line in whole:
            self._log.write(_ESCAPES.sub(b"", line.rstrip(b"\r").rsplit(b"\r")[-1]) + b"\n")


def _terminal_like_ours() -> tuple[int, int]:
    read_end, write_end = os.openpty()
    termios.tcsetwinsize(write_end, termios.tcgetwinsize(sys.stdout.fileno()))
    attributes = termios.tcgetattr(write_end)
    attributes[1] &= ~termios.OPOST  # newlines are translated once, by the real terminal
    termios.tcsetattr(write_end, termios.TCSANOW, attributes)
    return read_end, write_end


class Waiting:
    """Tells how long something is being waited for: one line that counts on a terminal, now and then a line
    elsewhere."""

    def __init__(self, what: str, limit_s: float):
        self._what, self._limit_s = what, limit_s
        self._started = self._shown = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._started

    def show(self) -> None:
        """Call this again and again."""
        text = f"{self._what}: {self.seconds:.0f} s (at most {self._limit_s:.0f} s)"
        if sys.stdout.isatty():
            print(f"\r{text}", end="", flush=True)
        elif time.monotonic() - self._shown > _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            print(text, flush=True)

    def done(self) -> None:
        """Take the line away again."""
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)
