"""What the CPU of this machine can compute."""

from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


def has_fast_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether the CPU multiplies matrices faster in bfloat16 than in float32: with AMX it does. The units of AVX-512
    alone (`avx512_bf16`) are slower than those of float32 (docs/measured.md). Where Linux lists no features, the answer
    is no.
    """
    if not cpu_info.is_file():
        return False
    lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    return any("amx_bf16" in line.split() for line in lines if line.startswith("flags"))
