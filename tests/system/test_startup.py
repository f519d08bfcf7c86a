"""Imports of large libraries, and what programs import."""

import gc
import subprocess
import sys

import pytest

from classroom_rl.system.startup import large_imports
from tests.conftest import ROOT


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


def test_a_fine_tuning_does_not_import_vllm() -> None:
    command = "import sys; import classroom_rl.trainer.sft.run; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=False).returncode == 0
