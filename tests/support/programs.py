"""Programs: those of the project run to their end, and scripts that stand in for others."""

import os
import subprocess
import sys
from pathlib import Path

from classroom_rl.system.shipped import ROOT


def run_program(program: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """`run_program("train_rl.py", "seed=3")`, or with `-m` and a module first."""
    file = str(ROOT / program) if program.endswith(".py") else program
    return subprocess.run(
        [sys.executable, file, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def write_script(path: Path, lines: str) -> Path:
    """Write an executable shell script, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
