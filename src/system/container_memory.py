"""How much memory a container, or a job of a batch system, may use. It uses Python's standard library alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux writes it: cgroups v2 and v1."""


def container_limit() -> int | None:
    """The lowest limit in bytes; None outside a container, and in one without a limit."""
    limits = []
    for path in LIMIT_FILES:
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits, default=None)
