"""Waiting for something that another process or thread does."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    """Return once it holds; fail if it does not within these seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
