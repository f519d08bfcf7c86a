"""Tests of what the programs decide on a machine with GPUs, up to the first call of CUDA. `nvidia-smi` is faked;
configurations and the settings of accelerate and DeepSpeed are real."""

import asyncio
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from classroom_rl.config.base import GenerationConfig, ModelConfig
from classroom_rl.config.benchmark import BENCHMARKS
from classroom_rl.config.checks import check_train_rl, reward_weights
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.engines.vllm.engine_base import EngineProcess
from classroom_rl.environments.classroom.environment import PHASES
from classroom_rl.errors import ConfigError, EngineFailure
from classroom_rl.launch.cli import main as launcher
from classroom_rl.launch.commands import with_precision
from classroom_rl.launch.quickstart import main as quickstart
from classroom_rl.launch.quickstart import make_models
from classroom_rl.launch.quickstart_plan import make_commands
from classroom_rl.memory.budget import GIB, Launch
from classroom_rl.memory.report import report, show_evaluation_shares
from classroom_rl.memory.sources import (
    NotEstimated,
    gpu_is_there,
    gpu_memory,
    memory_by_nvidia_smi,
    refuse_crowded_gpu,
    what_is_crowded,
)
from classroom_rl.models.precision import PRECISIONS, check_precision
from classroom_rl.rollout.environment import models_on_engines, phases_of
from classroom_rl.server.open_models import open_roles
from classroom_rl.system.processes import Signals
from classroom_rl.trainer.grpo import run as grpo_run
from classroom_rl.trainer.grpo.config import grpo_config
from classroom_rl.trainer.sft.run import _refuse_hidden_data_parallelism

TRAINED = sorted(path.stem for path in (ROOT / "config/train_rl").glob("*.yaml"))
MEASURED = sorted({path.stem for path in (ROOT / "config/eval").glob("*.yaml")} - {*BENCHMARKS})
"""On a published benchmark nothing is played: the tutor's engine is alone on the GPU."""
LAUNCHED = sorted(path.stem for path in (ROOT / "config/deepspeed").glob("*.yaml"))
NVIDIA_SMI = """#!/bin/sh
case "$*" in
  -L) for gpu in {gpus}; do echo "GPU $gpu: NVIDIA H100 80GB HBM3 (UUID: GPU-$gpu)"; done ;;
  *memory.total*) for pair in {memories}; do
    case "$*" in *--id=*) case "$*" in *--id=${{pair%%:*}}*) echo ${{pair#*:}} ;; esac ;; *) echo ${{pair#*:}} ;; esac
    done ;;
  *) exit 2 ;;
esac
"""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this machine a number of fake GPUs; torch counts those that CUDA_VISIBLE_DEVICES leaves visible."""

    def have(count: int, mebibytes: int = 81559, first: int | None = None) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        memories = [mebibytes if gpu or first is None else first for gpu in range(count)]
        text = NVIDIA_SMI.format(
            gpus=" ".join(map(str, range(count))),
            memories=" ".join(f"{gpu}:{memory}" for gpu, memory in enumerate(memories)),
        )
        (folder / "nvidia-smi").write_text(text, encoding="utf-8")
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        everything = ",".join(map(str, range(count)))
        visible = lambda: os.environ.get("CUDA_VISIBLE_DEVICES", everything)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len([each for each in visible().split(",") if each]))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "to be removed, and put back in the end")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return have


@pytest.fixture
def without_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise NotEstimated(f"nobody is asked for {name}")

    monkeypatch.setattr("classroom_rl.memory.report.read_shape", nothing)


def words_of(output: str, program: str) -> list[str]:
    """The words of the command in a dry run's output that starts this program."""
    return next(shlex.split(line) for line in output.splitlines() if f" {program}" in line)


def trained(*arguments: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", arguments, check_train_rl)


def roles_of(config: TrainRLConfig) -> dict[str, ModelConfig]:
    return models_on_engines(config, reward_weights(config))


# make quickstart ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8])
def test_the_quickstart_takes_one_gpu_in_float32_with_engines_that_leave_room(count, gpus, tmp_path, capsys):
    gpus(count, mebibytes=8192)
    overrides = [f"logging.save_dir={tmp_path / 'run'}"]
    assert quickstart([*overrides, "dry_run=true"]) == 0
    trainer = words_of(capsys.readouterr().out, "classroom_rl.launch.train")
    flags = trainer[trainer.index("classroom_rl.launch.accelerate_launch") + 1 : trainer.index("--module")]
    assert flags == ["--config_file", "config/deepspeed/1GPU.yaml", "--mixed_precision", "no"]

    commands = make_commands(overrides)
    assert (commands.config.train.dtype, commands.config.train.optimizer) == ("float32", "adamw_torch")
    assert {model.vllm.dtype for model in roles_of(commands.config).values()} == {"float32"}
    found = report(commands.config, lambda: Launch(1, zero_stage=2))
    assert "memory on a GPU of 8.00 GiB" in found.lines[0] and found.refusals == []
    refuse_crowded_gpu(roles_of(commands.config), phases_of(commands.config))


def test_the_fine_tuning_of_the_quickstart_sees_one_of_several_gpus(gpus, tmp_path, monkeypatch):
    gpus(8)
    commands, state = make_commands([f"logging.save_dir={tmp_path / 'run'}"]), SimpleNamespace(num_processes=1)
    with pytest.raises(ConfigError, match="8 GPUs are visible to one process"):
        _refuse_hidden_data_parallelism(state)
    started = {}

    class Program:
        def __init__(self, name, command, signals, log, echo, environment):
            started[name] = environment or {}

        __enter__, __exit__, wait = lambda self: self, lambda *_: None, lambda *_: 0

    monkeypatch.setattr("classroom_rl.launch.quickstart.Child", Program)
    for given, first in ((None, "0"), ("3,5", "3"), ("GPU-7f", "GPU-7f")):
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        make_models(commands.models, SimpleNamespace(stage=lambda *_: Signals()), Signals())
        assert started["train_sft.py"] == {"CUDA_VISIBLE_DEVICES": first}
        with monkeypatch.context() as of_the_program:
            of_the_program.setenv("CUDA_VISIBLE_DEVICES", first)
            _refuse_hidden_data_parallelism(state)


def test_gpus_that_are_hidden_are_not_there(gpus, monkeypatch):
    assert not gpu_is_there() and memory_by_nvidia_smi() == []
    gpus(2, mebibytes=16384)
    assert gpu_is_there() and memory_by_nvidia_smi() == [16 * GIB, 16 * GIB]
    assert gpu_memory(None) == (16 * GIB, "by nvidia-smi; this torch does not see the GPU")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not gpu_is_there() and memory_by_nvidia_smi() == []


def test_the_script_decides_as_the_quickstart_does(gpus):
    gpus(1)
    command = ["./start_rl_training.sh", "--config-name", "quickstart", "dry_run=true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "--config_file config/deepspeed/1GPU.yaml --mixed_precision no --module classroom_rl.launch.train"
        in done.stdout
    )
    assert "memory on a GPU of 79.65 GiB (by nvidia-smi" in done.stdout


# All that is shipped ------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], None]]:
    """Sets the environment variables that `accelerate launch` with these flags sets for the trainer."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    def launch(flags: list[str]) -> None:
        arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args([*flags, "train_rl.py"]))
        arguments.deepspeed_fields_from_accelerate_config = ",".join([*defaults.deepspeed_config, "mixed_precision"])
        _, environment = prepare_deepspeed_cmd_env(arguments)
        for name in [each for each in os.environ if each.startswith("ACCELERATE_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            if name.startswith("ACCELERATE_"):
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("WORLD_SIZE", str(arguments.num_processes))

    yield launch


def options_for_trl(config: TrainRLConfig, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The options that TRL's GRPOConfig would get; the class itself would set up the processes."""
    monkeypatch.setattr("classroom_rl.trainer.grpo.config.GRPOConfig", lambda **options: SimpleNamespace(**options))
    return grpo_config(config, Path("runs/nowhere"))


@pytest.mark.usefixtures("without_hub")
@pytest.mark.parametrize("launched", LAUNCHED)
@pytest.mark.parametrize("name", TRAINED)
def test_every_configuration_trains_in_its_precision_under_every_launch(
    name, launched, gpus, accelerated, monkeypatch, capsys
):
    from accelerate import DeepSpeedPlugin

    gpus(4)
    file = f"config/deepspeed/{launched}.yaml"
    config = trained("--config-name", name)
    assert launcher(["--config-name", name, "--config_file", file, "dry_run=true"]) == 0
    trainer = words_of(capsys.readouterr().out, "classroom_rl.launch.train")
    by_launcher = trainer[trainer.index("classroom_rl.launch.accelerate_launch") + 1 : trainer.index("--module")]
    wanted = PRECISIONS[config.train.dtype]
    assert by_launcher == ["--config_file", file, "--mixed_precision", wanted]
    for flags in (by_launcher, ["--config_file", file]):  # the second as typed by a user
        accelerated(flags)
        check_precision(config.train.dtype, os.environ)
        options = options_for_trl(config, monkeypatch)
        assert (options.bf16, options.fp16) == (wanted == "bf16", wanted == "fp16")
        assert options.optim == config.train.optimizer
        plugin = DeepSpeedPlugin()  # what transformers makes of it:
        told = "bf16" if options.bf16 else "fp16" if options.fp16 else os.environ["ACCELERATE_MIXED_PRECISION"]
        plugin.set_mixed_precision(told)
        enabled = {block: plugin.deepspeed_config[block]["enabled"] for block in ("bf16", "fp16")}
        assert enabled == {"bf16": wanted == "bf16", "fp16": wanted == "fp16"}
        assert plugin.zero_stage == (3 if "zero3" in launched else 2)


@pytest.mark.parametrize("name", TRAINED)
def test_the_engines_of_every_configuration_fit_side_by_side(name, gpus):
    gpus(1, mebibytes=8192 if name == "quickstart" else 81559)
    config = trained("--config-name", name)
    assert len(roles_of(config)) >= (1 if config.environment == "marooned" else 2), "a game has the policy alone"
    refuse_crowded_gpu(roles_of(config), phases_of(config))


@pytest.mark.parametrize("name", MEASURED)
def test_the_engines_of_every_evaluation_fit_side_by_side(name, gpus, capsys):
    gpus(1)
    config = load(EvalConfig, "eval", ["--config-name", name, "server_url=null"], check_eval)
    show_evaluation_shares(config)
    assert "student_model.vllm.gpu_memory_utilization=" in capsys.readouterr().out


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "dtype", "message"),
    [
        ("bf16", "float32", r"mixed_precision bf16, but train.dtype is float32, for which it is no\..*=bfloat16\.$"),
        ("fp16", "bfloat16", r"mixed_precision fp16, but train.dtype is bfloat16, for which it is bf16\..*=float16\.$"),
        ("fp8", "bfloat16", r"mixed_precision fp8, .* set it to bf16\.$"),
    ],
)
def test_a_contradiction_of_precisions_is_refused_before_anything_is_loaded(
    told, dtype, message, tmp_path, monkeypatch, capsys
):
    """The launcher refuses it in the file and as a flag; the trainer refuses it if accelerate was started by hand."""
    own = tmp_path / "own.yaml"
    text = (ROOT / "config/deepspeed/1GPU.yaml").read_text(encoding="utf-8")
    own.write_text(text.replace("mixed_precision: 'no'", f"mixed_precision: {told}"), encoding="utf-8")
    quick = ["--config-name", "quickstart", f"train.dtype={dtype}", "dry_run=true"]
    assert launcher([*quick, "--config_file", str(own)]) == 2
    assert re.search(f"{re.escape(str(own))} has {message}", capsys.readouterr().err.strip())
    with pytest.raises(ConfigError, match=f"accelerate's flags have {message}"):
        with_precision(["--config_file", "config/deepspeed/1GPU.yaml", f"--mixed_precision={told}"], dtype)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", told)
    config = trained(f"train.dtype={dtype}", f"logging.save_dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=message):
        grpo_run.train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", ["mixed_precision: 'no'", "mixed_precision: no", "num_processes: 1"])
def test_accelerates_no_leaves_it_to_the_dtype(settings, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(settings, encoding="utf-8")
    for dtype in PRECISIONS:
        flags = ["--config_file", str(file)]
        assert with_precision(flags, dtype) == [*flags, "--mixed_precision", PRECISIONS[dtype]]
        check_precision(dtype, {})
        check_precision(dtype, {"ACCELERATE_MIXED_PRECISION": "no"})
        check_precision(dtype, {"ACCELERATE_MIXED_PRECISION": PRECISIONS[dtype]})


def test_a_deepspeed_file_of_another_precision_is_refused(tmp_path):
    file = tmp_path / "zero.json"
    environment = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    for text in ("{}", '{"bf16": {"enabled": "auto"}}', '{"bf16": {"enabled": true}}', '{"fp16": {"enabled": false}}'):
        file.write_text(text, encoding="utf-8")
        check_precision("bfloat16", environment)
    for text, message in (
        ('{"bf16": {"enabled": false}}', "bf16.enabled is false in .*zero.json, but train.dtype is bfloat16"),
        ('{"fp16": {"enabled": true}}', "fp16.enabled is true in .*zero.json, but train.dtype is bfloat16"),
        ("{", "deepspeed_config_file .*zero.json cannot be read"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            check_precision("bfloat16", environment)


HALVES = [f"{role}_model.vllm.gpu_memory_utilization=0.5" for role in ("teacher", "student")]
BOTH_KEYS = "teacher_model.vllm.gpu_memory_utilization=0.5 [+] student_model.vllm.gpu_memory_utilization=0.5"


def test_two_halves_of_a_gpu_are_refused_before_any_engine_starts(gpus, tmp_path):
    """vLLM would load the first engine and refuse the second. On CPUs shares have no meaning."""
    config = trained("--config-name", "quickstart", *HALVES, f"logging.save_dir={tmp_path}")
    refuse_crowded_gpu(roles_of(config), phases_of(config))
    gpus(1, mebibytes=24576)
    with pytest.raises(ConfigError, match=f"ask for 1 of it, and their CUDA contexts 0.042 more: {BOTH_KEYS}"):
        asyncio.run(open_roles(config, {}, tmp_path))


def test_a_small_gpu_beside_a_large_one_refuses_nobody(gpus, monkeypatch):
    """CUDA orders GPUs by speed, nvidia-smi in another way."""
    config = trained("--config-name", "language_tutor", "judge_model.model_name_or_path=rules",
                     "judge_model.use_openrouter=false")  # fmt: skip
    gpus(2, first=4096)
    refuse_crowded_gpu(roles_of(config), phases_of(config))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="ask for 0.8 of it, and their CUDA contexts 0.250 more"):
        refuse_crowded_gpu(roles_of(config), phases_of(config))


def test_a_dry_run_refuses_shares_of_more_than_a_gpu_on_any_machine(tmp_path):
    """Also without a GPU and without train.gpu_memory_gib. If the memory is known, CUDA contexts count as well."""
    crowded = [*HALVES, "teacher_model.vllm.gpu_memory_utilization=0.7"]
    quick = ["--config-name", "quickstart"]
    for find_launch in (None, Launch):
        [refusal] = report(trained(*quick, *crowded), find_launch).refusals
        assert "ask for 1.2 of it: teacher_model.vllm.gpu_memory_utilization=0.7 + student_model" in refusal
    assert report(trained(*quick, *HALVES), Launch).refusals == [], "two halves on CPUs"
    [refusal] = report(trained(*quick, *HALVES, "train.gpu_memory_gib=24"), None).refusals
    assert "cannot hold what the engines needs" in refusal and BOTH_KEYS.replace("[+]", "+") in refusal
    measured = load(EvalConfig, "eval", ["--config-name", "quickstart", "server_url=null", *crowded], check_eval)
    with pytest.raises(ConfigError, match=r"ask for 1\.2 of it"):
        show_evaluation_shares(measured)


def test_engines_that_take_turns_may_ask_for_more_together(tmp_path):
    roles = {role: ModelConfig("m") for role in ("teacher", "student", "judge")}
    [refusal] = what_is_crowded(roles, (), None)
    assert "ask for 1.5 of it" in refusal and refusal.endswith("or set generation.schedule=phased.")
    assert what_is_crowded(roles, PHASES, None) == []
    roles["student"].vllm.gpu_memory_utilization = 0.4
    roles["judge"].vllm.gpu_memory_utilization = 0.99
    [refusal] = what_is_crowded(roles, PHASES, 80 * GIB)
    assert refusal.startswith("The engines of the judging share one GPU") and "student" not in refusal
    assert refusal.endswith("are left.")


@pytest.mark.parametrize(("set_before", "method"), [(None, "spawn"), ("fork", "fork")])
def test_engines_spawn_their_processes_unless_told_otherwise(set_before, method, monkeypatch):
    """vLLM forks on GPUs, but its CPU build never does. So the test asks before vLLM knows its platform."""
    from vllm.utils.system_utils import get_mp_context

    class Engine(EngineProcess):
        @staticmethod
        def _load(*_):
            raise ValueError(get_mp_context().get_start_method())

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", set_before or "")
    if set_before is None:
        monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    with pytest.raises(EngineFailure, match=f"could not load m: {method}$"):
        asyncio.run(Engine.start(ModelConfig("m"), 1, GenerationConfig()))
