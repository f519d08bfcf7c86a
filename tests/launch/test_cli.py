"""The launcher: what it shows, and that no process is left behind however it ends."""

import importlib
import signal
import subprocess

import pytest

from classroom_rl.launch.cli import main
from tests.conftest import ROOT


def test_dry_run_shows_both_commands_with_the_overrides(capsys):
    arguments = ["--config-name", "quickstart", "train.learning_rate=1e-4", "generation.max_turns=5", "dry_run=true"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    server, trainer = output.strip().splitlines()[-2:]
    for command, program in ((server, "classroom_rl.launch.server"), (trainer, "classroom_rl.launch.train")):
        assert f"{program} --config-name quickstart train.learning_rate=1e-4 generation.max_turns=5" in command
    assert "learning_rate: 0.0001" in output and "max_turns: 5" in output


@pytest.mark.parametrize("module", ["classroom_rl.launch.cli", "classroom_rl.launch.quickstart"])
def test_the_launchers_know_the_keys_of_dotenv_as_the_programs_do(module, monkeypatch):
    """The launchers need the server's token, because they ask for its health."""
    calls = []
    monkeypatch.setattr(f"{module}.read_keys", lambda: calls.append(module))
    assert importlib.import_module(module).main(["--config-name" if "cli" in module else "--x"]) == 2
    assert calls == [module]


def test_a_misspelt_key_ends_it_with_a_message(capsys):
    assert main(["--config-name", "quickstart", "train.learning_rat=1"]) == 2
    assert "train.learning_rate" in capsys.readouterr().err


def test_the_script_decides_as_the_quickstart_does(gpus):
    gpus(1)
    command = ["./start_rl_training.sh", "--config-name", "quickstart", "dry_run=true"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert (
        "--config_file config/deepspeed/1GPU.yaml --mixed_precision no --module classroom_rl.launch.train"
        in result.stdout
    )
    assert "memory on a GPU of 79.65 GiB (by nvidia-smi" in result.stdout


@pytest.mark.parametrize(("trainer", "status"), [("succeeds", 0), ("fails", 3), ("is killed", 128 + signal.SIGKILL)])
def test_the_trainers_status_is_the_launchers(launched, trainer, status):
    launch = launched("serves", trainer)
    exit_status, output, errors = launch.end()
    assert exit_status == status, errors
    assert "step 1" in output
    assert ("trainer.log" in errors) == (status != 0)
    assert (launch.folder / "trainer.log").read_text(encoding="utf-8") == "step 1\n"


@pytest.mark.parametrize(
    ("phase", "signum"), [("loading", signal.SIGINT), ("training", signal.SIGTERM), ("training", signal.SIGHUP)]
)
def test_signals_end_everything_that_was_started(launched, phase, signum):
    launch = launched("loads for ever" if phase == "loading" else "serves", "trains")
    launch.pids("server" if phase == "loading" else "trainer")
    launch.process.send_signal(signum)
    status, _, errors = launch.end()
    assert status == 128 + signum
    assert signum.name in errors and "Traceback" not in errors
