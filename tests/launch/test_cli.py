"""Tests of the launcher: which program gets which argument, and that no process is left behind however it ends.

Server and trainer are small stand-ins; the code that starts, watches and stops them is real.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import ROOT
from classroom_rl.errors import ConfigError
from classroom_rl.launch.cli import main
from classroom_rl.launch.commands import check_accelerate_flags, split_arguments, with_accelerate_config
from classroom_rl.server.client import server_url
from classroom_rl.system.processes import refuse_taken_port

GENEROUS_S = 300.0


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "accelerate", "hydra"),
    [
        ("--config-name x.yaml", "", "--config-name x.yaml"),
        ("--config-name=x a=1", "", "--config-name=x a=1"),
        ("-cn x -cd my_folder", "", "-cn x -cd my_folder"),
        (
            "--config_file config/deepspeed/zero3_4GPU.yaml --config-name language_tutor.yaml",
            "--config_file config/deepspeed/zero3_4GPU.yaml",
            "--config-name language_tutor.yaml",
        ),
        (
            "train.learning_rate=1e-4 --num_machines 2 --machine_rank 1 generation.max_turns=5 --config-name=q",
            "--num_machines 2 --machine_rank 1",
            "train.learning_rate=1e-4 generation.max_turns=5 --config-name=q",
        ),
        ("--multi_gpu a.b=[1,2] --debug --config-name q", "--multi_gpu --debug", "a.b=[1,2] --config-name q"),
        ("--num_machines=2 --main_process_ip ::1 ++a.b=1", "--num_machines=2 --main_process_ip ::1", "++a.b=1"),
        ("--rdzv_conf join_timeout=60 seed=3", "--rdzv_conf join_timeout=60", "seed=3"),
        ("--rdzv-conf join_timeout=60 seed=3", "--rdzv-conf join_timeout=60", "seed=3"),
        ("~a.b +c=1 ~d=2 -cn q", "", "~a.b +c=1 ~d=2 -cn q"),
        ("dataset.train_datasets.0.ratio=/a/b.x -cn q", "", "dataset.train_datasets.0.ratio=/a/b.x -cn q"),
    ],
)
def test_flags_are_accelerates_the_rest_is_hydras(line, accelerate, hydra):
    split = split_arguments(line.split())
    assert split.accelerate == accelerate.split()
    assert split.hydra == hydra.split()


def test_an_override_with_spaces_stays_whole():
    split = split_arguments(["-cn", "q", "logging.wandb_tags=[one tag, another]", "logging.run_group=a b"])
    assert split.hydra == ["-cn", "q", "logging.wandb_tags=[one tag, another]", "logging.run_group=a b"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--config-name", "--config-name needs a value"),
        ("--config-dir --config-name q", "--config-dir needs a value"),
        ("--multirun --config-name q", "--multirun"),
        ("-m", "-m"),
        ("--config-path conf", "--config-dir"),
        ("--config-name q language_tutor.yaml", "language_tutor.yaml is neither"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(line, named):
    with pytest.raises(ConfigError, match=named):
        split_arguments(line.split())


def test_values_of_accelerates_flags_are_found():
    split = split_arguments(["--machine-rank", "3", "--num_machines=4", "-cn", "q"])
    assert split.accelerate_value("--machine_rank") == "3"
    assert split.accelerate_value("--num_machines") == "4"
    assert split.accelerate_value("--main_process_ip") is None


def test_the_accelerate_config_must_be_there():
    with pytest.raises(ConfigError, match="1CPU.yaml"):
        with_accelerate_config(["--config_file", "nowhere.yaml"])
    given = ["--num_machines", "2", "--config_file=config/deepspeed/1CPU.yaml"]
    assert with_accelerate_config(given) == given
    chosen = with_accelerate_config(["--debug"])
    assert chosen[0] == "--config_file" and Path(chosen[1]).is_file() and chosen[2:] == ["--debug"]


@pytest.mark.parametrize("flags", [["--num_processes", "2"], ["--zero_stage=3"], ["--num-machines", "2"]])
def test_deepspeed_comes_with_more_processes_on_the_cpu(flags, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert with_accelerate_config([])[1] == "config/accelerate/1CPU.yaml"
    assert with_accelerate_config(flags) == ["--config_file", "config/deepspeed/1CPU.yaml", *flags]


def test_accelerate_looks_at_its_flags_before_anything_starts():
    check_accelerate_flags(["--config_file", "config/deepspeed/1CPU.yaml", "--num_machines", "2"])
    with pytest.raises(ConfigError, match="nu_machines"):
        check_accelerate_flags(["--config_file", "config/deepspeed/1CPU.yaml", "--nu_machines", "2"])


@pytest.mark.parametrize("config", ["accelerate/1CPU.yaml", "deepspeed/1CPU.yaml"])
@pytest.mark.parametrize(
    ("program", "status", "message"),
    [
        ("sys.exit(2)", 2, ""),
        ("raise SystemExit(9)", 9, ""),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "was ended by SIGKILL. The system does that when memory runs out.",
        ),
        ("", 0, ""),
    ],
)
def test_a_trainer_in_one_process_ends_with_its_own_message_and_status(tmp_path, config, program, status, message):
    path = tmp_path / "trainer.py"
    path.write_text(f"import os, signal, sys\nprint('error: a reason', file=sys.stderr, flush=True)\n{program}\n")
    command = [
        sys.executable,
        "-m",
        "classroom_rl.launch.accelerate_launch",
        "--config_file",
        f"config/{config}",
        str(path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GENEROUS_S)
    assert done.returncode == status, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "CalledProcessError" not in done.stderr
    assert done.stderr.partition("error: a reason\n")[2].count("\n") == bool(message) and message in done.stderr


def test_dry_run_shows_both_commands_with_the_overrides(capsys):
    arguments = ["--config-name", "quickstart", "train.learning_rate=1e-4", "generation.max_turns=5", "dry_run=true"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    server, trainer = shown.strip().splitlines()[-2:]
    for command, program in ((server, "classroom_rl.launch.server"), (trainer, "classroom_rl.launch.train")):
        assert f"{program} --config-name quickstart train.learning_rate=1e-4 generation.max_turns=5" in command
    assert "learning_rate: 0.0001" in shown and "max_turns: 5" in shown


@pytest.mark.parametrize("module", ["classroom_rl.launch.cli", "classroom_rl.launch.quickstart"])
def test_the_launchers_know_the_keys_of_dotenv_as_the_programs_do(module, monkeypatch):
    """The launchers need the server's token, because they ask for its health."""
    read = []
    monkeypatch.setattr(f"{module}.read_keys", lambda: read.append(module))
    assert importlib.import_module(module).main(["--config-name" if "cli" in module else "--x"]) == 2
    assert read == [module]


def test_a_misspelt_key_ends_it_with_a_message(capsys):
    assert main(["--config-name", "quickstart", "train.learning_rat=1"]) == 2
    assert "train.learning_rate" in capsys.readouterr().err


def test_a_server_for_everyone_is_reached_on_this_machine():
    assert server_url(GenerationConfig(server_host="0.0.0.0", server_port=81)) == "http://127.0.0.1:81"
    assert server_url(GenerationConfig(server_host="::1", server_port=82)) == "http://[::1]:82"


# --- processes -------------------------------------------------------------------------------------------------------

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
if MODE == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    while not os.path.exists(os.path.join(FOLDER, "trainer.seen")):
        time.sleep(0.05)  # until its children have been seen
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
from classroom_rl.config.base import GenerationConfig, LoggingConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.launch import cli, server_process
class WaitingForTheLoad(server_process.Waiting):
    seconds = property(lambda self: super().seconds if os.path.exists(os.path.join(FOLDER, "server.pids")) else 0.0)
server_process.Waiting = WaitingForTheLoad
child = server_process.Child
child.GRACE_S = GRACE
scan, stop = child._scan, child.stop
def scan_and_tell(self):
    scan(self)
    if len(self._descendants) >= 2:
        self.log.with_suffix(".seen").touch()
def tell_and_stop(self):
    self.log.with_suffix(".stopping").touch()
    stop(self)
child._scan, child.stop = scan_and_tell, tell_and_stop
generation = GenerationConfig(server_port=PORT, server_start_timeout_s=LIMIT)
config = TrainRLConfig(generation=generation, logging=LoggingConfig(save_dir=FOLDER))
programs = [[sys.executable, FOLDER + "/server.py"], [sys.executable, FOLDER + "/trainer.py"]]
cli._launch_from = lambda arguments, signals: cli.launch(config, *programs, "0", signals)
sys.exit(cli.main(["--config-name", "x"]))
"""

HEALTH = json.dumps(
    {
        "status": "ok",
        "roles": {},
        "policy": {"run_id": "r", "version": 0},
        "run_folder": "/",
        "running_requests": [],
        "running_conversations": 0,
        "finished_conversations": 0,
    }
)


def _listen_to_signals() -> None:
    """Reset signals that the parent of the tests may ignore (nohup does): children would inherit that."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


class Launch:
    """A running launcher with the stand-ins."""

    def __init__(self, folder: Path, server: str, trainer: str, limit_s: float = GENEROUS_S, grace_s: float = 20.0):
        self.folder, self.port = folder, free_port()
        values = {"FOLDER": str(folder), "PORT": self.port, "HEALTH": HEALTH, "LIMIT": limit_s, "GRACE": grace_s}
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
        """Wait for the end; returns exit status, stdout and stderr."""
        output, errors = self.process.communicate(timeout=GENEROUS_S)
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
        noted = [int(pid) for path in self.folder.glob("*.all") for pid in path.read_text(encoding="utf-8").split()]
        return [pid for pid in noted if runs(pid)]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(reached, seconds: float = GENEROUS_S) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def launched(tmp_path):
    launches = []

    def start(server: str, trainer: str, **options) -> Launch:
        launches.append(Launch(tmp_path, server, trainer, **options).start())
        return launches[-1]

    yield start
    for each in launches:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()
        for pid in each.left():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("trainer", "status"), [("succeeds", 0), ("fails", 3), ("is killed", 128 + signal.SIGKILL)])
def test_the_trainers_status_is_the_launchers(launched, trainer, status):
    launch = launched("serves", trainer)
    ended, output, errors = launch.end()
    assert ended == status, errors
    assert "step 1" in output
    assert ("trainer.log" in errors) == (status != 0)
    assert launch.left() == []
    assert (launch.folder / "trainer.log").read_text(encoding="utf-8") == "step 1\n"


def test_a_server_that_dies_while_loading_ends_the_launch_with_its_last_lines(launched):
    launch = launched("dies loading", "succeeds")
    status, _, errors = launch.end()
    assert status == 2
    assert "status 7" in errors and "RuntimeError: no such model" in errors and "server.log" in errors
    assert not (launch.folder / "trainer.pids").exists()
    assert launch.left() == []


def test_a_server_that_does_not_get_ready_is_given_up_on(launched):
    launch = launched("loads for ever", "succeeds", limit_s=1.0)
    status, _, errors = launch.end()
    assert status == 2 and "within generation.server_start_timeout_s = 1 s" in errors and "loading weights" in errors
    assert launch.left() == []


def test_a_server_that_dies_again_and_again_ends_the_launch(launched):
    launch = launched("serves", "kills the server")
    status, _, errors = launch.end()
    assert status == 2 and f"error: The server ended with status {128 + signal.SIGKILL}" in errors
    assert errors.count("is started again") == 3
    assert launch.left() == []


def test_a_server_that_dies_while_the_training_gets_on_is_started_again(launched):
    launch = launched("serves", "makes steps and kills the server")
    status, _, errors = launch.end()
    assert status == 0, errors
    assert errors.count("is started again (1 of at most 3 times") == 5
    assert launch.left() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("phase", ["loading", "training"])
def test_signals_end_everything_that_was_started(launched, phase, signum):
    launch = launched("loads for ever" if phase == "loading" else "serves", "trains")
    launch.pids("server" if phase == "loading" else "trainer")
    launch.process.send_signal(signum)
    status, _, errors = launch.end()
    assert status == 128 + signum
    assert signum.name in errors and "Traceback" not in errors
    assert launch.left() == []


def test_a_second_signal_does_not_wait_for_a_server_that_ignores_the_first(launched):
    launch = launched("ignores SIGTERM", "trains", grace_s=10 * GENEROUS_S)
    launch.pids("trainer")
    launch.process.send_signal(signal.SIGINT)
    wait_until(lambda: (launch.folder / "server.stopping").exists())  # two signals that come at once are one
    assert launch.process.poll() is None
    launch.process.send_signal(signal.SIGINT)
    assert launch.end()[0] == 128 + signal.SIGINT
    assert launch.left() == []


def test_a_killed_launcher_takes_the_programs_with_it(launched):
    launch = launched("serves", "trains")
    main_processes = [launch.pids("server")[0], launch.pids("trainer")[0]]
    launch.process.kill()
    wait_until(lambda: not any(runs(pid) for pid in main_processes))


def test_a_taken_port_is_refused_and_its_holder_left_alone(launched, tmp_path):
    launch = Launch(tmp_path, "serves", "succeeds")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", launch.port))
        holder.listen()
        status, _, errors = launch.start().end()
    assert status == 2
    assert str(launch.port) in errors and f"Process {os.getpid()} listens there" in errors
    assert not (tmp_path / "server.pids").exists()


ECHOING = """
import sys
from pathlib import Path
from classroom_rl.system.processes import Child, Signals
program, log = sys.argv[1:]
with Signals() as signals, Child("it", [sys.executable, program], signals, Path(log), echo=True) as child:
    child.wait()
"""
ECHOED = """
import sys
print(sys.stdout.isatty())
print("10 %\\r50 %\\r100 %")
print("caf\\u00e9")
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_program_sees_a_terminal_if_there_is_one_and_its_log_has_whole_lines(tmp_path, terminal):
    read_end, write_end = os.openpty() if terminal else os.pipe()
    (tmp_path / "program.py").write_text(ECHOED, encoding="utf-8")
    command = [sys.executable, "-c", ECHOING, str(tmp_path / "program.py"), str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    subprocess.run(command, stdout=write_end, env=environment, check=True, timeout=GENEROUS_S)
    shown = os.read(read_end, 4096).decode("utf-8").replace("\r\n", "\n")
    os.close(read_end)
    os.close(write_end)
    assert shown == f"{terminal}\n10 %\r50 %\r100 %\ncafé\n"
    assert (tmp_path / "log").read_text(encoding="utf-8") == f"{terminal}\n100 %\ncafé\n"


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="192.0.2.1"):
        refuse_taken_port("192.0.2.1", free_port())
