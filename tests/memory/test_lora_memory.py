"""Tests of the memory budget of an adapter against numbers computed by hand for a model of known shape."""

from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.base import LoraConfig
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.memory.budget import GIB, AdapterJob, Launch, trainer_memory
from classroom_rl.memory.report import report
from classroom_rl.memory.sources import read_shape
from classroom_rl.models.lora import adapter_shape
from tests.memory.test_budget import CHECKPOINTS, CONTEXT, LAYER, job, sizes, write_config

# Rank 16, in every layer: queries 16 × (2560 + 4096), keys and values 2 × 16 × (2560 + 1024), result
# 16 × (4096 + 2560), gate and up 2 × 16 × (2560 + 9728), down 16 × (9728 + 2560): 917,504.
ADAPTER = 36 * 917_504
# The width of its matrices' inputs, in every layer: 5 × 2560 for queries, keys, values, gate and up, 4096 and 9728.
ADAPTER_INPUTS = 36 * (5 * 2560 + 4096 + 9728)
LORA = AdapterJob(ADAPTER, ADAPTER_INPUTS, dropout=True)


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    return write_config(tmp_path / "Qwen3-4B", {})


def test_an_adapters_shape_is_counted_without_weights(qwen):
    shape = adapter_shape("teacher_model.lora", qwen, LoraConfig())
    assert (shape.parameters, shape.inputs, shape.rank) == (ADAPTER, ADAPTER_INPUTS, 16) == (33_030_144, 958_464, 16)


def test_with_zero_an_adapter_has_gradients_and_states_and_the_weights_have_none(qwen):
    two = trainer_memory(job(read_shape(qwen), Launch(2, zero_stage=2), reference=False, adapter=LORA))
    assert sizes(two.held) == {
        "weights (16 bit)": 8_044_936_192 + 66_060_288,
        "master weights (32 bit)": 66_060_288,  # half of the adapter, 4 bytes each
        "optimizer states": 33_030_144,
        "CUDA context": CONTEXT,
    }
    assert sizes(two.backward) == {
        "gradients": 33_030_144,
        "ZeRO's gradient bucket": 1_000_000_000,
        "activations kept (checkpoints)": CHECKPOINTS,
        # Added to the layer's activations: two bytes and a mask byte per adapter input, 26,624 × 3 bytes a token.
        "one layer again, or output head": LAYER + 1_308_622_848,
    }
    assert sizes(two.step) == {"gradients": 33_030_144, "gradients (32 bit)": 66_060_288}
    three = trainer_memory(job(read_shape(qwen), Launch(4, zero_stage=3), reference=False, adapter=LORA))
    assert sizes(three.held)["weights (16 bit)"] == (8_044_936_192 + 66_060_288) // 4
    assert sizes(three.held)["optimizer states"] == 16_515_072


def test_without_deepspeed_the_weights_beside_an_adapter_have_16_bits(qwen):
    memory = trainer_memory(job(read_shape(qwen), Launch(1), reference=False, adapter=LORA))
    assert sizes(memory.held) == {
        "weights (16 bit)": 8_044_936_192,
        "adapter (32 bit)": 132_120_576,
        "optimizer states": 66_060_288,
        "CUDA context": CONTEXT,
    }
    assert sizes(memory.backward) == {
        "gradients": 132_120_576,
        "autocast's copies of weights": 66_060_288,
        "activations kept (checkpoints)": CHECKPOINTS,
        "one layer again, or output head": LAYER + 1_308_622_848,
    }
    calm = replace(LORA, dropout=False)
    without = trainer_memory(job(read_shape(qwen), Launch(1), reference=False, adapter=calm))
    assert sizes(without.backward)["one layer again, or output head"] == LAYER


def test_the_report_knows_lora(qwen):
    overrides = [
        f"teacher_model.model_name_or_path={qwen}",
        f"student_model.model_name_or_path={qwen}",
        "teacher_model.lora={enable: true, rank: 20}",
        "teacher_model.vllm.dtype=bfloat16",
        "train.dtype=bfloat16",
        "train.beta=0.1",
        "train.gpu_memory_gib=80",
    ]
    config = load(TrainRLConfig, "train_rl", overrides, check_train_rl)
    lines = report(config, lambda: Launch(1, zero_stage=2)).lines
    trainer = next(line for line in lines if line.startswith("trainer: "))
    assert f"4,022,468,096 parameters, an adapter of {ADAPTER * 20 // 16:,} learns, bfloat16" in trainer
    assert not any("reference" in line for line in lines)
    weights = next(line for line in lines if "asleep: on the host" in line)
    # vLLM has room for two adapters of rank 32: (4,022,468,096 + 2 × 66,060,288) × 2 bytes.
    assert weights.endswith(f"{(4_022_468_096 + 2 * 66_060_288) * 2 / GIB:.2f} GiB")


def test_too_large_a_training_is_told_of_lora(qwen):
    overrides = [f"{role}_model.model_name_or_path={qwen}" for role in ("teacher", "student")]
    for lora, told in ((False, True), (True, False)):
        more = [f"teacher_model.lora.enable={lora}", "train.gpu_memory_gib=12"]
        config = load(TrainRLConfig, "train_rl", [*overrides, *more], check_train_rl)
        refusals = "\n".join(report(config, lambda: Launch(1, zero_stage=2)).refusals)
        assert "backward pass" in refusals or lora
        assert ("teacher_model.lora.enable=true" in refusals) is told
