"""Lets vLLM's CPU build use Triton through its interpreter (TRITON_INTERPRET=1), which computes kernels in Python.

The engines of engines/vllm/test_worker_extension.py have this folder on their path. vLLM asks whether Triton has a
backend called `cpu`. The interpreter needs none, so the backend here only has to exist.
"""

from importlib import import_module


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver, compiler = _Driver, None


# vLLM depends on Triton and installs the release that fits.
import_module("triton.backends").backends.setdefault("cpu", _Backend)
