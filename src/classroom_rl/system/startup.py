"""Helpers for a program's start: faster imports of large libraries, how OpenMP's threads wait, CPU features, and the
memory limit of a container. Uses only Python's standard library."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def large_imports() -> Iterator[None]:
    """A context for imports, in which Python's garbage collector is off. Modules create many objects; the collector
    would traverse all of them again and again (for seconds with torch, transformers and TRL) and free nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_CPU_INFO = Path("/proc/cpuinfo")
OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables by which a user sets how OpenMP's threads wait: for all runtimes, for libgomp, and for the runtimes of
Intel and LLVM."""
SHORT_WAIT = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def short_openmp_wait(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables for a process that computes on the CPU, to be set before it loads OpenMP. Empty if the user
    has set one of them.

    OpenMP's threads wait for each other in a busy loop before they sleep: by default for milliseconds (libgomp, which
    torch and vLLM load here) or for a fifth of a second (the other runtimes). If processes share cores, this loop takes
    time away from the thread that is waited for, and a step takes several times as long. docs/measured.md says what
    shorter waits cost on idle cores.
    """
    return {} if any(name in environment for name in OPENMP_VARIABLES) else dict(SHORT_WAIT)


def has_fast_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether the CPU multiplies matrices faster in bfloat16 than in float32, which is so with AMX, and with the
    bfloat16 instructions of AVX-512 on AMD's CPUs; on Intel's these are slower than float32 (docs/measured.md). False
    if Linux lists no CPU flags.
    """
    if not cpu_info.is_file():
        return False
    lines = [line.split() for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()]
    flags = {flag for line in lines if line[:1] == ["flags"] for flag in line}
    return "amx_bf16" in flags or ("avx512_bf16" in flags and ["vendor_id", ":", "AuthenticAMD"] in lines)


LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files with the memory limit of a container or batch job, for cgroups v2 and v1."""


def container_limit() -> int | None:
    """The lowest memory limit in bytes; None outside a container, and in one without a limit."""
    limits = []
    for path in LIMIT_FILES:
        with suppress(OSError, ValueError):  # the file is missing, or says "max"
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits, default=None)
