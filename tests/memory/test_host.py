"""Tests of the budget of host memory against hand-computed numbers, and that the processes of a training load no model
into it."""

from types import SimpleNamespace

import pytest
import torch
from trl.trainer import grpo_trainer

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.memory.budget import CUDA_CONTEXT, GIB, Launch, total, trainer_memory
from classroom_rl.memory.host import (
    PROCESS,
    PUBLISHED_AT_ONCE,
    EngineOnHost,
    host_parts,
    machine_memory,
    trainer_process,
    what_does_not_fit,
)
from classroom_rl.memory.report import report
from classroom_rl.memory.sources import launch_of_environment, launch_of_flags, read_shape
from classroom_rl.trainer.grpo.config import grpo_config
from classroom_rl.trainer.model_loading import device_for_weights, models_go_to, weights_dtype
from tests.memory.test_budget import config, job, qwen, sizes  # noqa: F401

PARAMETERS = 4_022_468_096
HEAD = 4 * 151_936 * 2560  # the output head, which is the embedding, in 32 bits


@pytest.fixture(autouse=True)
def no_container(monkeypatch):
    monkeypatch.setattr("classroom_rl.system.container_memory.LIMIT_FILES", [])


@pytest.fixture
def shape(qwen):  # noqa: F811
    return read_shape(qwen)


# What is counted ----------------------------------------------------------------------------------------------------


def test_a_process_on_a_gpu_reads_weights_matrix_by_matrix(shape):
    for launch in (Launch(4, zero_stage=2), Launch(4)):
        assert sizes(trainer_process(job(shape, launch), on_cpu=False)) == {
            "process": PROCESS,
            "largest matrix, as weights are read": HEAD,
        }
    assert sizes(trainer_process(job(shape, Launch(4, zero_stage=3)), on_cpu=False)) == {"process": PROCESS}


def test_what_deepspeed_offloads_is_counted_for_every_process_of_the_machine(shape):
    launch = Launch(8, zero_stage=3, optimizer_on_host=True, weights_on_host=True, machines=2)
    share = PARAMETERS // 8
    assert sizes(trainer_process(job(shape, launch), on_cpu=False)) == {
        "process": PROCESS,
        "master weights, gradients (32 bit)": 8 * share,
        "optimizer states": 2 * share,
        "weights (16 bit)": 2 * 2 * share,  # and those of the reference model
    }
    parts = sizes(host_parts(job(shape, launch), [], 0, on_cpu=False))
    assert parts["4 × trainer: optimizer states"] == 4 * 2 * share
    assert parts["trainer: weights as they are written"] == PUBLISHED_AT_ONCE


def test_on_cpus_everything_is_in_the_machines_memory(shape):
    alone = job(shape, Launch(2, zero_stage=2), number_bytes=4, state_bytes=8)
    memory = trainer_memory(alone)
    fullest = total(memory.held) - CUDA_CONTEXT + max(total(memory.backward), total(memory.step))
    engines = [EngineOnHost(PARAMETERS * 4, workers=1, cache=GIB)] * 2
    assert sizes(host_parts(alone, engines, asleep=7, on_cpu=True)) == {
        "2 × trainer: process": 2 * PROCESS,
        "2 × trainer: what the trainer holds and computes": 2 * fullest,
        "processes of the engines": 4 * PROCESS,
        "weights of the engines": 2 * 4 * PARAMETERS,
        "caches of the engines": 2 * GIB,
    }


def test_machines_of_a_launch(monkeypatch):
    flags = ["--config_file", "config/deepspeed/zero3_4GPU.yaml", "--num_machines", "2", "--num_processes", "8"]
    flags += ["--machine_rank", "0", "--main_process_ip", "10.0.0.1"]
    assert launch_of_flags(flags) == Launch(8, 3, machines=2)
    told = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "ACCELERATE_USE_DEEPSPEED": "true"}
    assert launch_of_environment(told) == Launch(8, 2, machines=2)
    assert launch_of_environment({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}) == Launch(4, machines=1)


# What comes of it ---------------------------------------------------------------------------------------------------


def test_what_a_machine_cannot_hold_is_refused_where_it_would_run_and_told_elsewhere(qwen, monkeypatch):  # noqa: F811
    """Two engines of 7.49 GiB sleep beside four processes that offload their optimizer to host memory."""
    launch = Launch(4, zero_stage=2, optimizer_on_host=True)
    # 4 × (1 + 1.449 + 10 bytes × 1,005,617,024), 0.931 written, 4 processes of engines, 14.985 of weights asleep
    needed = 4 * (PROCESS + HEAD + 10 * PARAMETERS // 4) + PUBLISHED_AT_ONCE + 4 * PROCESS + 4 * PARAMETERS
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    planned = report(config(qwen, "train.gpu_memory_gib=80"), lambda: launch)
    assert planned.refusals == []
    [warning] = [line for line in planned.lines if line.startswith("warning: ")]
    assert (
        f"A machine with 64.00 GiB of memory cannot hold what server and trainer need of it: {needed / GIB:.2f} GiB"
        in (warning)
    )
    assert "generation.colocate=false" in warning and "offload_optimizer_device" in warning
    monkeypatch.setattr("classroom_rl.memory.sources.memory_by_nvidia_smi", lambda: [80 * GIB])
    here = report(config(qwen), lambda: launch)
    assert here.refusals == [warning.removeprefix("warning: ")]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=needed))
    assert report(config(qwen), lambda: launch).refusals == []


def test_without_a_gpu_a_machine_too_small_is_a_warning_only(qwen, monkeypatch):  # noqa: F811
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=8 * GIB))
    found = report(config(qwen), lambda: Launch(1, zero_stage=2))
    assert found.refusals == []
    assert sum(line.startswith("warning: A machine with 8.00 GiB") for line in found.lines) == 1
    assert any("if all of it is on CPUs (this machine has 8.00 GiB)" in line for line in found.lines)


def test_what_fits_says_nothing(shape):
    parts = host_parts(job(shape, Launch(1, zero_stage=2)), [], 0, on_cpu=False)
    assert what_does_not_fit(parts, None, total(parts)) is None
    assert "Ways out: a machine with more memory." in what_does_not_fit(parts, None, total(parts) - 1)


# Loading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "has_adapter", "with_deepspeed", "loaded_in"),
    [
        ("bfloat16", False, False, "float32"),
        ("bfloat16", True, False, "bfloat16"),
        ("bfloat16", False, True, "bfloat16"),
        ("float16", False, True, "float16"),
        ("float32", False, True, "float32"),
    ],
)
def test_weights_are_loaded_in_the_type_that_they_are_kept_in(
    dtype, has_adapter, with_deepspeed, loaded_in, monkeypatch, tmp_path
):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(with_deepspeed).lower())
    assert weights_dtype(dtype, has_adapter) == loaded_in
    monkeypatch.setattr("classroom_rl.trainer.grpo.config.GRPOConfig", lambda **options: SimpleNamespace(**options))
    overrides = ["--config-name", "quickstart", f"train.dtype={dtype}", f"teacher_model.lora.enable={has_adapter}"]
    arguments = grpo_config(load(TrainRLConfig, "train_rl", overrides, check_train_rl), tmp_path)
    assert arguments.model_init_kwargs["dtype"] == loaded_in


def test_policy_and_reference_go_to_their_device_as_they_are_read(world):
    """TRL asks for no device under DeepSpeed. The device `meta` takes no memory; a model that was loaded to the host
    first would."""
    load_as_trl_does = lambda: grpo_trainer.create_model_from_path(  # noqa: E731
        str(world / "blank"), dtype="bfloat16", device_map=None, use_safetensors=True
    )
    with models_go_to(torch.device("meta")):
        model = load_as_trl_does()
    assert {each.device.type for each in model.parameters()} == {"meta"} and model.dtype == torch.bfloat16
    with models_go_to(None):
        assert {each.device.type for each in load_as_trl_does().parameters()} == {"cpu"}
    assert {each.device.type for each in load_as_trl_does().parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("device", "zero3", "wanted"), [("cuda:2", False, "cuda:2"), ("cuda:2", True, None), ("cpu", False, None)]
)
def test_the_device_is_this_processs_gpu(device, zero3, wanted, monkeypatch):
    monkeypatch.setattr(
        "classroom_rl.trainer.model_loading.PartialState", lambda: SimpleNamespace(device=torch.device(device))
    )
    monkeypatch.setattr("classroom_rl.trainer.model_loading.is_deepspeed_zero3_enabled", lambda: zero3)
    assert device_for_weights() == (None if wanted is None else torch.device(wanted))


@pytest.mark.parametrize(("limit", "counts"), [(f"{16 * GIB}\n", 16 * GIB), ("max\n", 64 * GIB), (None, 64 * GIB)])
def test_a_container_has_what_it_may_use(tmp_path, monkeypatch, limit, counts):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    monkeypatch.setattr(
        "classroom_rl.system.container_memory.LIMIT_FILES", [tmp_path / "memory.max", tmp_path / "not_there"]
    )
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert machine_memory() == counts
