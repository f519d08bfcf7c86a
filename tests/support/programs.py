"""Programs: those of the project run to their end, and scripts that stand in for others."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from classroom_rl.system.shipped import ROOT

_FORKS = multiprocessing.get_context("forkserver")
_STARTS = [f"classroom_rl.launch.{name}" for name in ("before_start", "cli", "evaluate", "server", "sft", "train")]
_LATER = ["classroom_rl.memory.report", "classroom_rl.engines.vllm.engine_start", "classroom_rl.models.precision"]
_FORKS.set_forkserver_preload(["pytest", "transformers.models.auto.tokenization_auto", *_STARTS, *_LATER])


def start_program(program: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """`start_program("train_rl.py", "seed=3")`, or with `-m` and a module first, by a Python of its own."""
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


def run_program(program: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """As `start_program`, with a file or a module, in a process forked from one that has imported the libraries and run
    nothing: imports take ten times as long as all that a dry run does. They do not see the `environment`."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, "stdout"), Path(folder, "stderr")]
        process = _FORKS.Process(target=_run, args=(program, arguments, cwd, os.environ | environment, outputs))
        process.start()
        process.join(600)
        assert process.exitcode is not None, f"{program} does not end"
        texts = [output.read_text(encoding="utf-8") for output in outputs]
    return subprocess.CompletedProcess([program, *arguments], process.exitcode, *texts)


def _run(program: str, arguments: tuple[str, ...], cwd: Path, environment: dict[str, str], outputs: list[Path]) -> None:
    for stream, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    if program.endswith(".py"):
        runpy.run_path(str(ROOT / program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def write_script(path: Path, lines: str) -> Path:
    """Write an executable shell script, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
