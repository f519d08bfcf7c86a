"""What one process does for all, or all do together."""

import pytest
from accelerate import Accelerator

from classroom_rl.errors import EngineFailure
from classroom_rl.trainer.collective import on_every_process, on_main_process


def test_failure_on_a_process_reaches_all() -> None:
    def fail() -> None:
        raise EngineFailure("gone")

    accelerator = Accelerator(cpu=True)
    assert on_main_process(accelerator, lambda: 3) == 3 and on_every_process(accelerator, lambda: 4) == 4
    for collective in (on_main_process, on_every_process):
        with pytest.raises(EngineFailure, match="gone"):
            collective(accelerator, fail)
