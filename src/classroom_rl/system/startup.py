"""What a program does first: loads large libraries in less time, and asks what the CPU can compute."""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def large_imports() -> Iterator[None]:
    """A context for imports. Python's garbage collector does not run in it: while modules make objects, it would look
    at all that there are again and again, for seconds with torch, transformers and TRL, and find nothing to free."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_CPU_INFO = Path("/proc/cpuinfo")
OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""What a user says about how OpenMP's threads wait: to every runtime, to libgomp and to Intel's and LLVM's."""
SHORT_WAIT = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def short_openmp_wait(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for a process that computes on the CPU, to be set before it loads OpenMP; none if the user has set one.

    OpenMP's threads wait for each other in a loop before they sleep, by default for milliseconds (libgomp, which torch
    and vLLM load here) or a fifth of a second (the others). While another process has the core of the thread that they
    wait for, the loop takes time away from it, and a step takes several times as long. docs/measured.md has what
    shorter waits cost on quiet cores.
    """
    return {} if any(name in environment for name in OPENMP_VARIABLES) else dict(SHORT_WAIT)


def has_fast_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether the CPU multiplies matrices faster in bfloat16 than in float32: with AMX it does. The units of AVX-512
    alone (`avx512_bf16`) are slower than those of float32 (docs/measured.md). Where Linux lists no features, the answer
    is no.
    """
    if not cpu_info.is_file():
        return False
    lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    return any("amx_bf16" in line.split() for line in lines if line.startswith("flags"))
