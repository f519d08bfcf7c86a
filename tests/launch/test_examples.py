"""The examples do what they say, as a stranger runs them."""

import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from classroom_rl.system.shipped import ROOT


@pytest.mark.full
def test_the_minimal_loop_learns_the_game(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/minimal_grpo.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=True)
    rewards = [float(reward) for reward in re.findall(r"^step .*reward (\S+)", done.stdout, re.MULTILINE)]
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) >= 0.2
