"""Each program checks its memory before it loads anything, and refuses nothing that fits."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import classroom_rl.memory.report
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.launch import cli
from classroom_rl.memory.budget import GIB
from classroom_rl.memory.report import check_launch_start, check_server_start, check_trainer_start
from tests.memory.test_budget import qwen  # noqa: F401
from tests.support.configs import run

CHECKS = {"server": check_server_start, "trainer": check_trainer_start}


def configured(name: str, *overrides: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", ["--config-name", name, *overrides], check_train_rl)


def with_qwen(model: str, *overrides: str) -> TrainRLConfig:
    models = [f"{role}_model.model_name_or_path={model}" for role in ("teacher", "student", "judge")]
    return configured("7b", *models, "train.dtype=bfloat16", *overrides)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives the machine a GPU of so many GiB, by nvidia-smi."""

    def give(gib: int) -> None:
        monkeypatch.setattr(classroom_rl.memory.report, "memory_by_nvidia_smi", lambda: [gib * GIB])
        monkeypatch.setattr(classroom_rl.memory.report, "gpu_is_there", lambda: True)
        monkeypatch.setattr(classroom_rl.memory.report, "machine_memory", lambda: 10_000 * GIB)

    return give


@pytest.mark.parametrize("program", CHECKS)
def test_what_does_not_fit_on_the_gpu_is_refused_before_the_start(qwen: str, gpu, program: str):  # noqa: F811
    gpu(8)
    with pytest.raises(ConfigError, match=r"8\.00 GiB"):
        CHECKS[program](with_qwen(qwen))


@pytest.mark.parametrize("program", CHECKS)
def test_the_gpu_that_is_here_counts_and_not_the_planned_one(qwen: str, gpu, program: str):  # noqa: F811
    gpu(8)
    with pytest.raises(ConfigError):
        CHECKS[program](with_qwen(qwen, "train.gpu_memory_gib=800"))
    gpu(800)
    CHECKS[program](with_qwen(qwen, "train.gpu_memory_gib=8"))


def test_a_trainer_alone_on_its_gpu_is_not_charged_for_the_engines_of_a_server(qwen: str, gpu):  # noqa: F811
    """Weights, states and gradients of 4 billion parameters take 67 GiB; the engines beside them would not fit."""
    gpu(80)
    config = with_qwen(qwen, "train.optimizer=adamw_bnb_8bit", "train.beta=0", "teacher_model.lora.enable=true")
    check_trainer_start(config)
    config = with_qwen(qwen, "train.optimizer=adamw_torch", "train.beta=0.1")
    with pytest.raises(ConfigError, match="A GPU of 80.00 GiB cannot hold what the (backward pass|optimizer step)"):
        check_trainer_start(config)


def test_the_launcher_refuses_before_it_starts_anything(qwen: str, gpu, monkeypatch, capsys):  # noqa: F811
    gpu(8)
    monkeypatch.setattr(cli, "launch", lambda *_: pytest.fail("something was started"))
    roles = [f"{role}_model.model_name_or_path={qwen}" for role in ("teacher", "student", "judge")]
    assert cli.main(["--config-name", "7b", *roles]) == 2
    assert "8.00 GiB" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["quickstart", "quickstart_ppo", "quickstart_supervised", "marooned", "small_tutor"])
def test_what_runs_on_a_small_cpu_today_is_not_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(classroom_rl.memory.report, "memory_by_nvidia_smi", list)
    monkeypatch.setattr(classroom_rl.memory.report, "machine_memory", lambda: 4 * GIB)
    config = configured(name)
    for check in CHECKS.values():
        check(config)
    check_launch_start(config, ["--config_file", "config/accelerate/1CPU.yaml"])


def test_what_may_not_fit_on_a_cpu_is_said(qwen: str, monkeypatch: pytest.MonkeyPatch, caplog):  # noqa: F811
    monkeypatch.setattr(classroom_rl.memory.report, "memory_by_nvidia_smi", list)
    monkeypatch.setattr(classroom_rl.memory.report, "machine_memory", lambda: 8 * GIB)
    with caplog.at_level(logging.WARNING):
        check_trainer_start(with_qwen(qwen))
    assert "A machine with 8.00 GiB of memory cannot hold what server and trainer need of it" in caplog.text


@pytest.mark.parametrize("program", ["train_rl.py", "vllm_server.py"])
def test_the_programs_check_before_they_load(qwen: str, program: str, tmp_path: Path, monkeypatch):  # noqa: F811
    """On a machine whose nvidia-smi lists a GPU of 4 GiB."""
    listing = tmp_path / "bin" / "nvidia-smi"
    listing.parent.mkdir()
    listing.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: tiny" || echo 4096\n')
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{listing.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    roles = [f"{role}_model.model_name_or_path={qwen}" for role in ("teacher", "student")]
    result = run(program, *roles, f"logging.save_dir={tmp_path / 'run'}")
    assert result.returncode == 2 and "4.00 GiB" in result.stderr and not (tmp_path / "run").exists()
