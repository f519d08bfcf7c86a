"""On the path of tests/test_model_runners.py's engines: lets vLLM's CPU build use Triton through its interpreter
(TRITON_INTERPRET=1), which computes kernels in Python. vLLM asks for a Triton backend called `cpu`; the interpreter
needs none, so that the one given here is never asked for anything but whether it is there."""

from triton.backends import backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver, compiler = _Driver, None


backends.setdefault("cpu", _Backend)
