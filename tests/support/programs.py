"""Runs a program of the project to its end."""

import os
import subprocess
import sys

from classroom_rl.system.shipped import ROOT


def run_program(*command: str, **environment: str) -> subprocess.CompletedProcess:
    """`run_program("train_rl.py", "seed=3")`, or with `-m` and a module first."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
