"""Reads the memory limit of a container or of a batch job. Uses only Python's standard library."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files with the limit, for cgroups v2 and v1."""


def container_limit() -> int | None:
    """The lowest limit in bytes; None outside a container, and in one without a limit."""
    limits = []
    for path in LIMIT_FILES:
        with suppress(OSError, ValueError):  # the file is missing, or says "max"
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits, default=None)
