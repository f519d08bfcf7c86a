"""The sbatch scripts, under stand-ins for `srun` and `scontrol`: the commands that they start, and whole trainings on
two nodes that are network namespaces."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.launch.cli import main as launcher
from classroom_rl.system.processes import Child, Signals
from tests.chaos.cases import LeftOut
from tests.chaos.network import ADDRESSES, two_machines
from tests.conftest import ROOT, free_port, quickstart_overrides
from tests.support import slurm
from tests.support.scripted_launcher import command as scripted_launcher
from tests.support.waiting import wait_until

RECORDER = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] != "-c":
    call = [os.environ["SLURMD_NODENAME"], os.environ.get("CLASSROOM_TOKEN"), *sys.argv[1:]]
    with open(os.path.join(os.environ["HOME"], "calls.jsonl"), "a") as file:
        file.write(json.dumps(call) + "\\n")
    if "vllm_server.py" in sys.argv:
        import time
        time.sleep(600)
"""
"""A Python that writes down what it was to run; a server stays."""
MINE = ("--config-name", "quickstart", "logging.save_dir=runs/mine")
STEPS = 6


@contextmanager
def job(folder: Path, script: str, nodes: Sequence[tuple[str, str]], *arguments: str, **chosen: str) -> Iterator[Child]:
    """A job under way; nothing of it is left after the block."""
    command = ["bash", str(ROOT / "examples/slurm" / script), *arguments]
    environment = slurm.job_environment(folder, nodes) | chosen
    with Signals() as signals, Child("the job", command, signals, folder / "job.log", environment=environment) as child:
        yield child


def ended(*what, **chosen: str) -> tuple[int, str]:
    """The status of a job, and what it said."""
    with job(*what, **chosen) as child:
        return child.wait(), child.last_lines(40)


def calls_of(folder: Path) -> list[list[str]]:
    """Node and command of each program that was started, in the order of the nodes; all had the token of the file."""
    token = (folder / ".classroom_token").read_text(encoding="utf-8").strip()
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(token) == 64 and {call.pop(1) for call in calls} == {token} and token not in str(calls)
    return sorted(calls)


def test_every_node_gets_a_launch_that_the_launcher_takes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = slurm.checkout(tmp_path / "checkout", RECORDER)
    variables = {"SLURM_GPUS_ON_NODE": "2", "ACCELERATE_CONFIG": "config/deepspeed/zero2_2CPU.yaml"}
    status, output = ended(folder, "shared.sbatch", [("10.0.0.1", ""), ("10.0.0.2", "")], *MINE, **variables)
    assert status == 0, output
    assert (folder / ".classroom_token").stat().st_mode & 0o777 == 0o600
    calls = calls_of(folder)
    assert [call[:3] for call in calls] == [
        [node, "-m", "classroom_rl.launch.cli"] for node in ("10.0.0.1", "10.0.0.2")
    ]
    assert [call[call.index("--machine_rank") + 1] for call in calls] == ["0", "1"]
    assert launcher([*calls[1][3:], "dry_run=true"]) == 0
    server, trainer = capsys.readouterr().out.strip().splitlines()[-2:]
    assert "[http://127.0.0.1:8005,http://127.0.0.1:8005]" in server and "generation.server_index=1" in server
    machines = "--machine_rank 1 --config_file config/deepspeed/zero2_2CPU.yaml --num_machines 2 --num_processes 4"
    assert f"{machines} --main_process_ip 10.0.0.1" in trainer


def test_servers_and_training_are_split_between_the_nodes(tmp_path: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    folder = slurm.checkout(tmp_path / "checkout", RECORDER)
    nodes = [(f"10.0.0.{node}", "") for node in range(1, 5)]
    status, output = ended(folder, "split.sbatch", nodes, *MINE, SERVER_NODES="2", SLURM_GPUS_ON_NODE="8")
    assert status == 0, output
    calls = calls_of(folder)
    urls = ["http://10.0.0.1:8005", "http://10.0.0.2:8005"]
    for index, (node, program, *arguments) in enumerate(calls[:2]):
        assert (node, program) == (nodes[index][0], "vllm_server.py")
        generation = load(TrainRLConfig, "train_rl", arguments, check_train_rl).generation
        assert (generation.server_host, generation.server_index) == ("0.0.0.0", index)
        assert generation.server_urls == urls
    for rank, (node, *arguments) in enumerate(calls[2:]):
        assert node == nodes[rank + 2][0] and arguments[:2] == ["-m", "classroom_rl.launch.accelerate_launch"]
        launch = launch_command_parser().parse_args(arguments[2:])
        assert (launch.num_machines, launch.machine_rank, launch.num_processes) == (2, rank, 16)
        assert (launch.main_process_ip, launch.deepspeed_multinode_launcher) == ("10.0.0.3", "standard")
        assert launch.training_script == "train_rl.py" and Path(launch.config_file).is_file()
        generation = load(TrainRLConfig, "train_rl", launch.training_script_args, check_train_rl).generation
        assert generation.server_urls == urls


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    folder = slurm.checkout(tmp_path / "checkout", RECORDER)
    (folder / ".classroom_token").write_text("t" * 64, encoding="utf-8")
    (folder / ".classroom_token").chmod(0o640)
    status, output = ended(folder, "shared.sbatch", [("10.0.0.1", "")], *MINE)
    assert status == 2 and "chmod 600" in output and not (folder / "calls.jsonl").exists()


@pytest.mark.parametrize(("failures", "status", "starts"), [("1", 0, 2), ("9", 3, 4)])
def test_servers_that_end_are_started_again_three_times(tmp_path: Path, failures, status, starts) -> None:
    """The first servers end with status 3; the training waits for one that stays."""
    program = RECORDER.replace(
        '    if "vllm_server.py" in sys.argv:',
        f"""    import time
    calls = lambda: open(os.path.join(os.environ["HOME"], "calls.jsonl")).read()
    if "vllm_server.py" in sys.argv and calls().count("vllm_server.py") <= {failures}:
        sys.exit(3)
    while "train_rl.py" in sys.argv and calls().count("vllm_server.py") <= {failures}:
        time.sleep(0.1)
    if "vllm_server.py" in sys.argv:""",
    )
    folder = slurm.checkout(tmp_path / "checkout", program)
    assert ended(folder, "split.sbatch", [("10.0.0.1", ""), ("10.0.0.2", "")], *MINE)[0] == status
    assert sum(call[1] == "vllm_server.py" for call in calls_of(folder)) == starts


# Whole trainings ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[list[tuple[str, str]]]:
    names = [f"slurm-{os.getpid()}-{node}" for node in range(2)]
    try:
        with two_machines(names=names):
            yield list(zip(ADDRESSES, names, strict=True))
    except LeftOut as reason:
        pytest.skip(str(reason))


def played(run_folder: Path) -> Counter:
    """Step, problem and student of each conversation that was trained on."""
    columns = ["step", "problem_id", "type", "student_name"]
    tables = [pq.read_table(path, columns=columns).to_pylist() for path in run_folder.glob("rollouts/*.parquet")]
    return Counter(tuple(row.values()) for rows in tables for row in rows)


def steps_of(run_folder: Path) -> list[int]:
    file = run_folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def overrides(run_folder: Path, world: Path, port: int = 8005) -> list[str]:
    sizes = [f"train.max_steps={STEPS}", "logging.save_steps=1", "train.num_samples_per_problem=2"]
    return [
        *quickstart_overrides(run_folder, world / "blank", world, port),
        "train.per_device_train_batch_size=4",
        *sizes,
    ]


@pytest.fixture(scope="module")
def on_one_machine(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Counter:
    run_folder = tmp_path_factory.mktemp("one") / "run"
    subprocess.run(scripted_launcher(overrides(run_folder, world, free_port())), cwd=ROOT, check=True, timeout=600)
    assert steps_of(run_folder) == list(range(1, STEPS + 1))
    return played(run_folder)


def end_of(child: Child) -> int:
    """The job's status, and no process of it is left."""
    status = child.wait()
    assert not [process for process in child._running() if process.pid != child.pid]
    return status


def program(child: Child, *words: str) -> psutil.Process:
    """The program of the job with these words on its command line."""
    for process in psutil.Process(child.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the script's `sleep`
            command = process.cmdline()
            if set(words) <= set(command) and Path(command[0]).name.startswith("python"):
                return process
    raise AssertionError(f"no program with {words}")


@pytest.mark.full
@pytest.mark.engines
@pytest.mark.parametrize(
    ("script", "kind", "hits"),
    [
        ("shared.sbatch", "deepspeed/zero2_2CPU", ["time limit"]),
        ("split.sbatch", "accelerate/1CPU", ["tests.support.scripted_server", "classroom_rl.launch.accelerate_launch"]),
    ],
)
def test_two_nodes_train_as_one_machine_does(
    script: str, kind: str, hits: list[str], nodes, world: Path, tmp_path: Path, on_one_machine: Counter
) -> None:
    """A job that stops before its time limit, or loses its training, goes on when it is started again; a server that
    dies is started again at once."""
    folder, run_folder = slurm.checkout(tmp_path / "checkout"), tmp_path / "run"
    small = {"PROCESSES_PER_NODE": "1", "GLOO_SOCKET_IFNAME": "cable", "ACCELERATE_CONFIG": f"config/{kind}.yaml"}
    arguments = overrides(run_folder, world)
    with job(folder, script, nodes, *arguments, **small) as child:
        for step, hit in enumerate(hits, start=1):
            wait_until(lambda: len(steps_of(run_folder)) >= step or child.poll() is not None, 1800)  # noqa: B023
            assert child.poll() is None, child.last_lines(40)
            if hit == "time limit":
                os.kill(child.pid, signal.SIGUSR1)
            else:
                program(child, hit).kill()
        status = end_of(child)
        assert (status == 0) == (hit == "time limit"), child.last_lines(40)
    assert len(steps_of(run_folder)) < STEPS
    assert ("requeue 17" in (folder / "scontrol.txt").read_text(encoding="utf-8")) == (hit == "time limit")
    restarted = "are started again (1 of at most 3 times)" in child.log.read_text(encoding="utf-8")
    assert restarted == (script == "split.sbatch")
    status, output = ended(folder, script, nodes, *arguments, **small)
    assert status == 0, output
    assert steps_of(run_folder) == list(range(1, STEPS + 1))
    assert played(run_folder) == on_one_machine
