"""The trainer's own message is the last text on the terminal, and its status is the status of the launch."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize("config", ["accelerate/1CPU.yaml", "deepspeed/1CPU.yaml"])
@pytest.mark.parametrize(
    ("program", "status", "message"),
    [
        ("sys.exit(2)", 2, ""),
        ("raise SystemExit(9)", 9, ""),
        ("os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL. The system does that when memory runs out."),
        ("", 0, ""),
    ],
)
def test_a_trainer_in_one_process_ends_with_its_own_message_and_status(tmp_path, config, program, status, message):
    path = tmp_path / "trainer.py"
    path.write_text(f"import os, sys\nprint('error: a reason', file=sys.stderr, flush=True)\n{program}\n")
    command = [sys.executable, "-m", "classroom_rl.launch.accelerate_launch", "--config_file", f"config/{config}"]
    result = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == status, result.stderr[-3000:]
    assert "Traceback" not in result.stderr and "CalledProcessError" not in result.stderr
    assert result.stderr.partition("error: a reason\n")[2].count("\n") == bool(message) and message in result.stderr
