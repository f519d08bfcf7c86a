"""The inputs of a budget: a model's shape, the launch, this machine's memory, and which engines share a GPU."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.environments.classroom.environment import PHASES
from classroom_rl.errors import ConfigError
from classroom_rl.memory.budget import GIB, Launch
from classroom_rl.memory.report import place_on_this_machine
from classroom_rl.memory.sources import (
    NotEstimated,
    gpu_is_there,
    gpu_memory,
    launch_of_environment,
    launch_of_flags,
    machine_memory,
    memory_by_nvidia_smi,
    read_shape,
    what_is_crowded,
)
from classroom_rl.rollout.environment import models_on_engines
from classroom_rl.server.open_models import open_roles
from tests.conftest import ROOT
from tests.memory.conftest import QWEN3_SHAPE, write_config
from tests.support.configs import training

# A model's shape ----------------------------------------------------------------------------------------------------


def test_a_models_shape_is_read_without_its_weights(qwen):
    assert read_shape(qwen) == QWEN3_SHAPE


def test_windows_and_experts_count(tmp_path):
    mixture = {"model_type": "qwen3_moe", "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_experts": 16}
    assert read_shape(write_config(tmp_path / "mixture", mixture | {"num_hidden_layers": 2})).mlp == 8 * 768
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 4096}
    sliding = read_shape(write_config(tmp_path / "sliding", kinds | {"use_sliding_window": True}))
    assert sliding.windows == (4096, None)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("runs/of/nobody", "there is no folder runs/of/nobody"),
        ({"model_type": "no-such-kind"}, "no-such-kind"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
    ],
)
def test_what_cannot_be_reckoned_is_said(model, reason, tmp_path):
    with pytest.raises(NotEstimated, match=reason):
        read_shape(model if isinstance(model, str) else write_config(tmp_path / "model", model))


# The launch ---------------------------------------------------------------------------------------------------------

TWO_MACHINES = ["--num_machines=2", "--num_processes=8", "--machine_rank=0", "--main_process_ip=10.0.0.1"]


@pytest.mark.parametrize(
    ("file", "flags", "launch"),
    [
        ("deepspeed/1GPU", [], Launch(1, 2)),
        ("deepspeed/zero2_4GPU", [], Launch(4, 2)),
        ("deepspeed/zero3_4GPU", [], Launch(4, 3)),
        ("deepspeed/zero3_4GPU", ["--num_processes=8", "--zero_stage", "2"], Launch(8, 2)),
        ("deepspeed/zero3_4GPU", TWO_MACHINES, Launch(8, 3, machines=2)),
        ("deepspeed/1GPU", ["--offload_optimizer_device", "cpu"], Launch(1, 2, optimizer_on_host=True)),
        ("fsdp/4GPU", [], Launch(4, fsdp=True)),
        ("accelerate/1CPU", [], Launch(1)),
    ],
)
def test_the_launch_is_what_accelerate_makes_of_its_flags(file, flags, launch):
    assert launch_of_flags(["--config_file", f"config/{file}.yaml", *flags]) == launch


DEEPSPEED = {"WORLD_SIZE": "4", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
FSDP = {"WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch(1)),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, Launch(4)),
        (DEEPSPEED, Launch(4, 3)),
        (DEEPSPEED | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Launch(8, 3, machines=2)),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, Launch(4, 3, weights_on_host=True)),
        (FSDP, Launch(4, fsdp=True)),
    ],
)
def test_the_launch_is_what_accelerate_told_this_process(environment, launch):
    assert launch_of_environment(environment) == launch


def test_a_file_of_deepspeed_takes_precedence(tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}))
    environment = DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    assert launch_of_environment(environment) == Launch(4, 1, optimizer_on_host=True)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (FSDP | {"FSDP_VERSION": "1"}, "FSDP1"),
        (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, "FSDP2 would keep the weights in host memory"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "ZeRO stage is 0"),
    ],
)
def test_other_launches_are_not_reckoned(environment, reason):
    with pytest.raises(NotEstimated, match=reason):
        launch_of_environment(environment)


# This machine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "counts"), [(f"{16 * GIB}\n", 16 * GIB), ("max\n", 64 * GIB), (None, 64 * GIB)])
def test_a_container_has_what_it_may_use(tmp_path, monkeypatch, limit, counts):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    files = [tmp_path / "memory.max", tmp_path / "not_there"]
    monkeypatch.setattr("classroom_rl.system.startup.LIMIT_FILES", files)
    if limit is not None:
        files[0].write_text(limit)
    assert machine_memory() == counts


def test_gpus_that_are_hidden_are_not_there(gpus, monkeypatch):
    assert not gpu_is_there() and memory_by_nvidia_smi() == []
    gpus(2, mebibytes=16384)
    assert gpu_is_there() and memory_by_nvidia_smi() == [16 * GIB, 16 * GIB]
    assert gpu_memory(None) == (16 * GIB, "by nvidia-smi; this torch does not see the GPU")
    assert gpu_memory(0.5) == (GIB // 2, "train.gpu_memory_gib")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not gpu_is_there() and memory_by_nvidia_smi() == []
        assert gpu_memory(None)[0] is None


# Engines on one GPU -------------------------------------------------------------------------------------------------


def refuse_engines_of(config) -> None:
    place_on_this_machine(config, models_on_engines(config, reward_weights(config)))


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "config/train_rl").glob("*.yaml")))
def test_the_engines_of_every_configuration_fit_side_by_side(name, gpus):
    gpus(4 if name == "7b" else 1, mebibytes=8192 if name == "quickstart" else 81559)
    refuse_engines_of(training("--config-name", name))


def test_two_halves_of_a_gpu_are_refused_before_any_engine_starts(gpus, tmp_path):
    """vLLM would load the first engine and refuse the second. On CPUs shares have no meaning."""
    halves = [f"{role}_model.vllm.gpu_memory_utilization=0.5" for role in ("teacher", "student")]
    config = training("--config-name", "quickstart", *halves, f"logging.save_dir={tmp_path}")
    refuse_engines_of(config)
    gpus(1, mebibytes=24576)
    keys = "teacher_model.vllm.gpu_memory_utilization=0.5 [+] student_model.vllm.gpu_memory_utilization=0.5"
    with pytest.raises(ConfigError, match=f"ask for 1 of it, and their CUDA contexts 0.065 more: {keys}"):
        asyncio.run(open_roles(config, {}, tmp_path))


def test_a_small_gpu_beside_a_large_one_refuses_nobody(gpus, monkeypatch):
    """CUDA orders GPUs by speed, nvidia-smi in another way."""
    rules = ["judge_model.model_name_or_path=rules", "judge_model.use_openrouter=false"]
    config = training("--config-name", "language_tutor", *rules)
    gpus(2, first=4096)
    refuse_engines_of(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="ask for 0.8 of it, and their CUDA contexts 0.390 more"):
        refuse_engines_of(config)


def test_engines_that_take_turns_may_ask_for_more_together():
    roles = {role: ModelConfig("m", VllmConfig(gpu_memory_utilization=0.5)) for role in ("teacher", "student", "judge")}
    (refusal,) = what_is_crowded(roles, (), None)
    assert "ask for 1.5 of it" in refusal and refusal.endswith("or set generation.schedule=phased.")
    roles["judge"].vllm.gpus = [1]
    assert what_is_crowded(roles, (), None) == [], "two halves on the first GPU, one on the second"
    roles["judge"].vllm.gpus = None
    assert what_is_crowded(roles, PHASES, None) == []
    roles["student"].vllm.gpu_memory_utilization = 0.4
    roles["judge"].vllm.gpu_memory_utilization = 0.99
    (refusal,) = what_is_crowded(roles, PHASES, 80 * GIB)
    assert refusal.startswith("The engines of the judging share one GPU") and "student" not in refusal
    assert refusal.endswith("are left.")
