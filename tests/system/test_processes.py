"""Programs that are started, and every process that they start, are ended by their ids; ports that are taken."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from classroom_rl.errors import ConfigError
from classroom_rl.system.processes import Child, Interrupted, Signals, free_port, refuse_taken_port
from tests.conftest import ROOT
from tests.launch.conftest import runs
from tests.support.waiting import wait_until

LEAVES_ITS_GROUP = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)]
print(*(child.pid for child in children), flush=True)
"""


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as entered:
        yield entered


def started(program: str, signals: Signals, folder: Path) -> Child:
    return Child("it", [sys.executable, "-c", program], signals, folder / "log", grace_s=0.0)


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_program_ends_with_its_status_and_last_lines(end, status, signals, tmp_path):
    (tmp_path / "log").write_text("of an earlier program\n")
    program = f"import os, sys\nfor i in range(30): print(i, flush=True)\n{end}"
    with started(program, signals, tmp_path) as child:
        assert child.wait() == status
        assert child.last_lines(2) == "28\n29" and "earlier" not in child.last_lines(100)


@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(0)"])
def test_what_a_program_started_ends_with_it_also_in_other_groups(then, signals, tmp_path):
    with started(LEAVES_ITS_GROUP + then, signals, tmp_path) as child:
        wait_until(lambda: len(child.last_lines().split()) == 2)
        pids = [int(pid) for pid in child.last_lines().split()]
        assert all(runs(pid) for pid in pids)
    assert not any(runs(pid) for pid in [child.pid, *pids])


def test_a_second_signal_does_not_wait_for_a_program_that_ignores_the_first(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", deaf]
    with Signals() as signals, Child("it", command, signals, tmp_path / "log", grace_s=3000.0) as child:
        wait_until(lambda: child.last_lines() == "deaf")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="interrupted by SIGTERM") as interruption:
            child.wait()
        assert interruption.value.status == 128 + signal.SIGTERM and not signals.impatient
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.impatient
    assert signal.getsignal(signal.SIGTERM) == before and not psutil.pid_exists(child.pid)


def test_a_program_ends_when_the_one_that_started_it_is_killed(tmp_path):
    outer = (
        "import pathlib, sys\nfrom classroom_rl.system.processes import Child, Signals\n"
        "child = Child('it', [sys.executable, '-c', 'import time; time.sleep(600)'], Signals(), "
        f"pathlib.Path({str(tmp_path / 'log')!r}))\nprint(child.pid, flush=True)\nchild.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    wait_until(lambda: not runs(pid))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_training_ends_with_the_launcher_of_accelerate(signum, tmp_path):
    """accelerate hands on no signal."""
    (tmp_path / "program.py").write_text(
        "import os, time\nfrom classroom_rl.system.processes import end_with_accelerate\n"
        "end_with_accelerate()\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    command = ["accelerate.commands.launch", "--config_file", str(ROOT / "config/accelerate/1CPU.yaml")]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, str(tmp_path / "program.py")], stdout=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    assert pid != process.pid
    process.send_signal(signum)
    process.wait()
    wait_until(lambda: not runs(pid))
    process.communicate()


def test_a_taken_port_is_refused_with_its_holder_and_another_machines_address():
    port = free_port()
    refuse_taken_port("127.0.0.1", port)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*Process {os.getpid()} listens there"):
            refuse_taken_port("127.0.0.1", port)
    with pytest.raises(ConfigError, match="192.0.2.1"):
        refuse_taken_port("192.0.2.1", port)
