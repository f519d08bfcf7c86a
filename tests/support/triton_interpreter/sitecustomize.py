"""On the path of tests/vllm/test_model_runners.py's engines: lets vLLM's CPU build use Triton through its interpreter
(TRITON_INTERPRET=1), which computes kernels in Python. vLLM asks for a Triton backend called `cpu`; the interpreter
needs none, so that the one given here is never asked for anything but whether it is there."""

from importlib import import_module


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver, compiler = _Driver, None


# vLLM brings Triton along, in the release that fits it.
import_module("triton.backends").backends.setdefault("cpu", _Backend)
