"""Stand-ins for SLURM's `srun` and `scontrol`, and a checkout in which the sbatch scripts find them.

A node is an address, alone or with a network namespace. `srun` starts the same command on each of its nodes, as SLURM
does: with its rank, with the whole step ended where one task fails, with signals passed on, and with nothing left
behind. Unknown options are errors.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from classroom_rl.system.shipped import ROOT
from tests.support.programs import write_script

NODES, RECORD = "STANDIN_NODES", "STANDIN_RECORD"
"""Variables: JSON of addresses and namespaces ("" for none), and the file that `scontrol` appends its calls to."""
_KILL_WAIT_S = 60.0
_PROGRAM = f"""#!{sys.executable}
import os, sys
arguments = sys.argv[1:]
scripted = {{"vllm_server.py": "scripted_server", "classroom_rl.launch.cli": "scripted_launcher"}}
for position, argument in enumerate(arguments[:2]):
    if argument in scripted:
        arguments[: position + 1] = ["-m", f"tests.support.{{scripted[argument]}}"]
os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])
"""
"""Python, with scripted engines in the place of vLLM's."""


def checkout(folder: Path, program: str = _PROGRAM) -> Path:
    """A folder from which the scripts can be started: the project's files, with `program` as its Python."""
    for name in (
        "config",
        "examples",
        "prompt_templates",
        "data",
        "start_rl_training.sh",
        "vllm_server.py",
        "train_rl.py",
    ):
        folder.mkdir(exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(program, encoding="utf-8")
    python.chmod(0o755)
    for name in ("srun", "scontrol"):
        write_script(folder / "bin" / name, f'exec "{sys.executable}" -m tests.support.slurm {name} "$@"')
    return folder


def job_environment(folder: Path, nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """What SLURM sets for a job that was submitted in this folder, and what the stand-ins need.

    Args:
        nodes: address and namespace of each; "" for this machine's own network.
    """
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "HOME": str(folder),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": f"node[0-{len(nodes) - 1}]",
        NODES: json.dumps(nodes),
        RECORD: str(folder / "scontrol.txt"),
    }


def _srun(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    for name in ("--nodes", "--ntasks", "--ntasks-per-node", "--relative", "--kill-on-bad-exit"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--cpu-bind", choices=["none"], required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    nodes = json.loads(os.environ[NODES])[options.relative :][: options.nodes]
    assert len(nodes) == options.nodes == options.ntasks and options.ntasks_per_node == 1
    received: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, _: received.append(signum))
    tasks = [_start(options.command, rank, *node) for rank, node in enumerate(nodes)]
    deadline = None
    while any(task.poll() is None for task in tasks):
        failed = any(task.poll() for task in tasks)
        if deadline is None and (received or (failed and options.kill_on_bad_exit)):
            deadline = time.monotonic() + _KILL_WAIT_S
            _signal(tasks, signal.SIGTERM)
        elif deadline is not None and time.monotonic() > deadline:
            _signal(tasks, signal.SIGKILL)
        time.sleep(0.05)
    for task in tasks:
        with suppress(ProcessLookupError):  # nothing was left
            os.killpg(task.pid, signal.SIGKILL)
    return max((task.returncode if task.returncode >= 0 else 128 - task.returncode) for task in tasks)


def _start(command: Sequence[str], rank: int, address: str, namespace: str) -> subprocess.Popen:
    ranks = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": address}
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    return subprocess.Popen([*inside, *command], env={**os.environ, **ranks}, process_group=0)


def _signal(tasks: Sequence[subprocess.Popen], signum: int) -> None:
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, signum)


def _scontrol(arguments: Sequence[str]) -> int:
    with Path(os.environ[RECORD]).open("a", encoding="utf-8") as record:
        print(*arguments, file=record)
    if list(arguments) == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]:
        print(*(address for address, _ in json.loads(os.environ[NODES])), sep="\n")
        return 0
    return int(list(arguments) != ["requeue", os.environ["SLURM_JOB_ID"]])


if __name__ == "__main__":
    sys.exit({"srun": _srun, "scontrol": _scontrol}[sys.argv[1]](sys.argv[2:]))
