"""A program's start: imports of large libraries, how threads wait, and what the CPU can do."""

import gc
from pathlib import Path

import pytest

from classroom_rl.system.startup import (
    OPENMP_VARIABLES,
    SHORT_WAIT,
    has_fast_bfloat16,
    large_imports,
    short_openmp_wait,
)


def test_no_garbage_is_collected_while_modules_are_imported() -> None:
    with large_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), large_imports():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with large_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_linux_says_of_a_cpu_tells_whether_bfloat16_is_fast(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    for vendor, flags, fast in (
        ("GenuineIntel", "fpu avx512_bf16 avx512_fp16", False),
        ("GenuineIntel", "fpu amx_bf16 amx_tile", True),
        ("AuthenticAMD", "fpu avx512_bf16", True),
        ("AuthenticAMD", "fpu avx512f", False),
    ):
        text = f"vendor_id\t: {vendor}\nmodel name\t: amx_bf16 in the name\nflags\t\t: {flags}\n"
        info.write_text(text, encoding="utf-8")
        assert has_fast_bfloat16(info) == fast
    assert not has_fast_bfloat16(tmp_path / "nowhere")


@pytest.mark.parametrize("given", OPENMP_VARIABLES)
def test_a_user_who_set_how_threads_wait_is_left_alone(given: str) -> None:
    assert short_openmp_wait({}) == SHORT_WAIT and short_openmp_wait({given: "1"}) == {}
