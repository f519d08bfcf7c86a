"""A launcher whose server and trainer are small stand-ins; the code that starts, watches and stops them is real."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, free_port
from tests.support.replay_server import health
from tests.support.waiting import wait_until

GENEROUS_S = 300.0

# Both stand-ins start a child in their process group and one that leaves it, as torchrun's workers do, and write down
# their ids.
COMMON = """
import json, os, signal, subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)]
def note():
    path = os.path.join(FOLDER, NAME + ".pids")
    with open(path + ".new", "w") as file:
        json.dump([os.getpid(), *(child.pid for child in children)], file)
    with open(path + ".all", "a") as file:
        file.write(" ".join(map(str, [os.getpid(), *(child.pid for child in children)])) + " ")
    os.replace(path + ".new", path)
"""

SERVER = """
import http.server
print("loading weights", flush=True)
note()
if MODE == "dies loading":
    print("RuntimeError: no such model", flush=True)
    os._exit(7)
if MODE == "loads for ever":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(HEALTH.encode())
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""

TRAINER = """
note()
print("step 1", flush=True)
if MODE == "fails":
    sys.exit(3)
if MODE == "succeeds":
    sys.exit(0)
if MODE == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
def kill_server():
    pid = json.load(open(os.path.join(FOLDER, "server.pids")))[0]
    os.kill(pid, signal.SIGKILL)
    while pid == json.load(open(os.path.join(FOLDER, "server.pids")))[0]:
        time.sleep(0.1)
if MODE == "kills the server":
    for _ in range(9):
        kill_server()
if MODE == "makes steps and kills the server":
    for step in range(5):
        kill_server()
        with open(os.path.join(FOLDER, "metrics.jsonl"), "a") as file:
            file.write("{}\\n")
    sys.exit(0)
time.sleep(600)
"""

DRIVER = """
import os, sys
from classroom_rl.config.base import GenerationConfig, TrainLoggingConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.launch import cli, server_process
class WaitingForTheLoad(server_process.Waiting):
    seconds = property(lambda self: super().seconds if os.path.exists(os.path.join(FOLDER, "server.pids")) else 0.0)
server_process.Waiting = WaitingForTheLoad
generation = GenerationConfig(server_port=PORT, server_start_timeout_s=LIMIT)
config = TrainRLConfig(generation=generation, logging=TrainLoggingConfig(save_dir=FOLDER))
programs = [[sys.executable, FOLDER + "/server.py"], [sys.executable, FOLDER + "/trainer.py"]]
cli._launch_from = lambda arguments, signals: cli.launch(config, *programs, "0", signals)
sys.exit(cli.main(["--config-name", "x"]))
"""

HEALTH = health("/").model_dump_json()


def _listen_to_signals() -> None:
    """Reset signals that the parent of the tests may ignore (nohup does): children would inherit that."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


class Launch:
    """A running launcher with the stand-ins."""

    def __init__(self, folder: Path, server: str, trainer: str, limit_s: float = GENEROUS_S):
        self.folder, self.port = folder, free_port()
        values = {"FOLDER": str(folder), "PORT": self.port, "HEALTH": HEALTH, "LIMIT": limit_s}
        for name, mode, text in (("server", server, SERVER), ("trainer", trainer, TRAINER)):
            self._write(name, {**values, "NAME": name, "MODE": mode}, COMMON + text)
        self._write("driver", values, DRIVER)
        self.process: subprocess.Popen | None = None

    def _write(self, name: str, values: dict, text: str) -> None:
        head = "".join(f"{key} = {value!r}\n" for key, value in values.items())
        (self.folder / f"{name}.py").write_text(head + text, encoding="utf-8")

    def start(self) -> "Launch":
        self.process = subprocess.Popen(
            [sys.executable, str(self.folder / "driver.py")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_listen_to_signals,
        )
        return self

    def end(self) -> tuple[int, str, str]:
        """Wait for the end, after which nothing may be left; returns exit status, stdout and stderr."""
        output, errors = self.process.communicate(timeout=GENEROUS_S)
        assert self.left() == []
        return self.process.returncode, output, errors

    def pids(self, name: str) -> list[int]:
        """The process ids of a stand-in and its children, once it has written them down."""
        path = self.folder / f"{name}.pids"

        def written() -> bool:
            if path.is_file() and path.read_text(encoding="utf-8").endswith("]"):
                return True
            assert self.process.poll() is None, f"the launcher ended: {self.process.stderr.read()}"
            return False

        wait_until(written)
        return json.loads(path.read_text(encoding="utf-8"))

    def left(self) -> list[int]:
        """The processes of both stand-ins that still run."""
        pids = [int(pid) for path in self.folder.glob("*.all") for pid in path.read_text(encoding="utf-8").split()]
        return [pid for pid in pids if runs(pid)]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """`launched(server, trainer)` starts a launcher whose programs behave in these modes."""
    launches = []

    def start(server: str, trainer: str, **options) -> Launch:
        launches.append(Launch(tmp_path, server, trainer, **options).start())
        return launches[-1]

    yield start
    for launch in launches:
        if launch.process.poll() is None:
            launch.process.kill()
            launch.process.communicate()
        for pid in launch.left():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def long_problems(tmp_path: Path) -> str:
    """The override for training on problems that leave no room for a conversation."""
    line = json.dumps({"problem": "word " * 2000}) + "\n"
    (tmp_path / "long.jsonl").write_text(8 * line, encoding="utf-8")
    return f"dataset.train_datasets=[{{name_or_path: {tmp_path / 'long.jsonl'}, answer_column: null}}]"
