"""The memory budget against numbers computed by hand for a model of known shape, and against the libraries."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from classroom_rl.config.models import LoraConfig
from classroom_rl.config.values import OPTIMIZERS
from classroom_rl.memory.budget import (
    CUDA_CONTEXT,
    GIB,
    HEAD_TILE,
    OPTIMIZER_STATES,
    PROCESS,
    ZERO3_SUB_GROUP,
    ZERO_BUCKET,
    AdapterJob,
    EngineJob,
    Launch,
    ModelShape,
    critic_parameters,
    engine_memory,
    layer_activations,
    refuse_host,
    total,
    trainer_memory,
    trainer_on_host,
)
from classroom_rl.memory.sources import read_shape
from classroom_rl.models.lora import adapter_shape
from tests.conftest import ROOT
from tests.memory.conftest import ADAPTER, ADAPTER_INPUTS, PARAMETERS, QWEN3_SHAPE, job, sizes, write_config

W16, W32 = 2 * PARAMETERS, 4 * PARAMETERS
CONTEXT = {"CUDA context": 837_518_622}
BUCKET = {"ZeRO's gradient bucket": 1_000_000_000}
CHECKPOINTS = 3_019_898_880  # 36 layers × 2560 × 2 bytes × 16384 tokens
# A layer, in bytes per token: its norms 2 × (4 + 2) × 2560 = 30,720, those of the heads (4 + 2) × (4096 + 1024) =
# 30,720, inputs of projections 2 × 2 × 2560 = 10,240, attention 4 × 2 × 4096 = 32,768, MLP 4 × 2 × 9728 = 77,824:
# 182,272.
LAYER = 2_986_344_448  # × 16384 tokens
HEAD = 268_435_456 + 1_555_824_640 + 167_772_160  # 4096 × 32768 × 2; 388,956,160 × 4; 16384 × 2560 × 4
ACTIVATIONS = {"activations kept (checkpoints)": CHECKPOINTS, "one layer again, or output head": LAYER}
LORA = AdapterJob(ADAPTER, ADAPTER_INPUTS, dropout=True)
WITH_LORA = {"reference": False, "adapter": LORA}
# Dropout adds two bytes and a mask byte per adapter input: 26,624 × 3 bytes a token.
LORA_ACTIVATIONS = ACTIVATIONS | {"one layer again, or output head": LAYER + 1_308_622_848}

HEAD_PARAMETERS = 388_956_160
PACKED = 1_874_416_679  # 3,633,511,936 weights: half a byte each, 1 byte for 64, 4 bytes for 64 × 256

CRITIC = 2 * 2560 * 2562 + 1  # 5120 × 2560 weights and 5120 of the inner layer, 5120 and 1 of the outer one

HELD, BACKWARD, STEP = "held", "backward", "step"
TRAININGS = {
    "ZeRO-2 with one process": (
        job(Launch(1, zero_stage=2)),
        {
            HELD: {
                "weights (16 bit)": W16,
                "master weights (32 bit)": W32,
                "optimizer states": W16,
                "reference model (16 bit)": W16,
            },
            BACKWARD: {"gradients": W16, **BUCKET, **ACTIVATIONS},
            STEP: {"gradients": W16, "gradients (32 bit)": W32},
        },
    ),
    "ZeRO-1 splits master weights and states, but no gradients": (
        job(Launch(4, zero_stage=1)),
        {
            HELD: {
                "weights (16 bit)": W16,
                "master weights (32 bit)": W32 // 4,
                "optimizer states": W16 // 4,
                "reference model (16 bit)": W16,
            },
            BACKWARD: {"gradients": W16, **BUCKET, **ACTIVATIONS},
        },
    ),
    "ZeRO-3 splits everything": (
        job(Launch(4, zero_stage=3)),
        {
            HELD: {
                "weights (16 bit)": W16 // 4,
                "master weights (32 bit)": W32 // 4,
                "optimizer states": W16 // 4,
                "reference model (16 bit)": W16 // 4,
            },
            BACKWARD: {
                "gradients": W16 // 4,
                **BUCKET,
                "weights gathered for a layer": 777_912_320,  # the head's matrix in 16 bits
                **ACTIVATIONS,
            },
            # A share has 1,005,617,024 numbers; ZeRO-3 steps with 1,000,000,000 at a time.
            STEP: {"gradients": W16 // 4, "gradients (32 bit)": 4_000_000_000},
        },
    ),
    "in 32 bits DeepSpeed has master weights all the same": (
        job(Launch(2, zero_stage=3), number_bytes=4, state_bytes=8, reference=False),
        {
            HELD: {
                "weights (32 bit)": W32 // 2,
                "master weights (32 bit)": W32 // 2,
                "optimizer states": 8 * PARAMETERS // 2,
            },
        },
    ),
    "what is offloaded is not on the GPU": (
        job(Launch(4, zero_stage=3, optimizer_on_host=True, weights_on_host=True), reference=False),
        {HELD: {}, BACKWARD: {**BUCKET, "weights gathered for a layer": 777_912_320, **ACTIVATIONS}, STEP: {}},
    ),
    "FSDP2 splits everything, in 32 bits": (
        job(Launch(4, fsdp=True)),
        {
            HELD: {"weights (32 bit)": W32 // 4, "optimizer states": W16 // 4, "reference model (32 bit)": W32 // 4},
            STEP: {"gradients": W32 // 4},
        },
    ),
    "without DeepSpeed every process holds all in 32 bits": (
        job(Launch(2)),
        {
            HELD: {
                "weights (32 bit)": W32,
                "optimizer states": 10_378_673_152,  # 2 × 3,633,511,936, and 8 × 388,956,160 of the embedding
                "reference model (32 bit)": W32,
            },
            BACKWARD: {
                "gradients": W32,
                "gradient buckets of DDP": W32,
                "autocast's copies of weights": W16,
                **ACTIVATIONS,
                "activations kept (checkpoints)": 2 * CHECKPOINTS,
            },
        },
    ),
    "a critic beside an adapter": (
        job(Launch(1, zero_stage=2), **WITH_LORA, critic=critic_parameters(2560)),
        {
            HELD: {
                "weights (16 bit)": W16 + 2 * (ADAPTER + CRITIC),
                "master weights (32 bit)": 4 * (ADAPTER + CRITIC),
                "optimizer states": 2 * (ADAPTER + CRITIC),
            },
        },
    ),
    "a critic, which the reference model has not": (
        job(Launch(1, zero_stage=3), critic=critic_parameters(2560)),
        {
            HELD: {
                "weights (16 bit)": W16 + 2 * CRITIC,
                "master weights (32 bit)": W32 + 4 * CRITIC,
                "optimizer states": 2 * (PARAMETERS + CRITIC),
                "reference model (16 bit)": W16,
            },
        },
    ),
    "a strong tutor, which ZeRO-3 splits": (
        job(Launch(4, zero_stage=3), **WITH_LORA, strong_tutor=QWEN3_SHAPE),
        {
            HELD: {
                "weights (16 bit)": (PARAMETERS + ADAPTER) // 4 * 2,
                "master weights (32 bit)": ADAPTER // 4 * 4,
                "optimizer states": ADAPTER // 4 * 2,
                "strong tutor (16 bit)": W16 // 4,
            },
        },
    ),
    "a strong tutor, which FSDP2 gathers": (
        job(Launch(4, fsdp=True), reference=False, strong_tutor=QWEN3_SHAPE),
        {HELD: {"weights (32 bit)": W32 // 4, "optimizer states": W16 // 4, "strong tutor (16 bit)": W16}},
    ),
    "an adapter with ZeRO-2": (
        job(Launch(2, zero_stage=2), **WITH_LORA),
        {
            HELD: {
                "weights (16 bit)": W16 + 2 * ADAPTER,
                "master weights (32 bit)": 4 * ADAPTER // 2,
                "optimizer states": 2 * ADAPTER // 2,
            },
            BACKWARD: {"gradients": 2 * ADAPTER // 2, **BUCKET, **LORA_ACTIVATIONS},
            STEP: {"gradients": 2 * ADAPTER // 2, "gradients (32 bit)": 4 * ADAPTER // 2},
        },
    ),
    "an adapter over 4 bits with ZeRO-2": (
        job(Launch(1, zero_stage=2), **WITH_LORA, in_4bit=True),
        {
            HELD: {
                "weights (16 bit)": 2 * (HEAD_PARAMETERS + ADAPTER),
                "weights (4 bit)": PACKED,
                "master weights (32 bit)": 4 * ADAPTER,
                "optimizer states": 2 * ADAPTER,
            },
        },
    ),
    "an adapter over 4 bits without DeepSpeed": (
        job(Launch(1), **WITH_LORA, in_4bit=True),
        {
            HELD: {
                "weights (16 bit)": 2 * HEAD_PARAMETERS,
                "weights (4 bit)": PACKED,
                "adapter (32 bit)": 4 * ADAPTER,
                "optimizer states": 2 * ADAPTER,
            },
        },
    ),
    "an adapter without DeepSpeed": (
        job(Launch(1), **WITH_LORA),
        {
            HELD: {
                "weights (16 bit)": W16,
                "adapter (32 bit)": 4 * ADAPTER,
                "optimizer states": 2 * ADAPTER,
            },
            BACKWARD: {
                "gradients": 4 * ADAPTER,
                "autocast's copies of weights": 2 * ADAPTER,
                **LORA_ACTIVATIONS,
            },
        },
    ),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_what_one_process_of_a_training_holds(name):
    training, expected = TRAININGS[name]
    memory = trainer_memory(training)
    parts = {moment: sizes(getattr(memory, moment)) for moment in expected}
    assert parts == expected | {HELD: expected[HELD] | CONTEXT}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"checkpointing": False}, {"activations": 36 * LAYER, "output head": HEAD}),
        # 1024 × 182,272 = 186,646,528 is less than 1024 × 32768 × 2 + 1,555,824,640 + 1024 × 2560 × 4.
        ({"tokens": 1024}, {"one layer again, or output head": 67_108_864 + 1_555_824_640 + 10_485_760}),
        (  # ten tiles of 16,777,216 × 4
            {"tokens": 1024, "distributions": True},
            {"one layer again, or output head": 671_088_640 + 1_555_824_640 + 10_485_760},
        ),
        (WITH_LORA | {"adapter": replace(LORA, dropout=False)}, {"one layer again, or output head": LAYER}),
    ],
)
def test_activations(changes, expected):
    backward = sizes(trainer_memory(job(Launch(1, zero_stage=2), **changes)).backward)
    assert {name: backward[name] for name in expected} == expected


def test_an_engines_weights_and_cache():
    memory = engine_memory(EngineJob(QWEN3_SHAPE, number_bytes=2, gpus=1, max_length=8192, max_num_seqs=256))
    assert memory.weights == W16
    assert memory.sampling == 155_582_464  # 256 × 151936 × 4
    assert memory.conversation == 1_207_959_552  # 2 × 36 layers × 8 heads × 128 × 2 bytes = 147,456; × 8192 tokens
    assert memory.cache(20 * GIB) == 20 * GIB - W16 - 155_582_464


def test_several_gpus_share_an_engine_by_heads():
    four, sixteen = (engine_memory(EngineJob(QWEN3_SHAPE, 2, gpus, 8192, 256)) for gpus in (4, 16))
    assert (four.weights, four.conversation) == (W16 // 4, 1_207_959_552 // 4)
    assert sixteen.conversation == 1_207_959_552 // 8, "a GPU has at least one of the 8 heads"


def test_a_sliding_window_limits_the_cache_of_its_layers():
    full, sliding = replace(QWEN3_SHAPE, windows=(None, None)), replace(QWEN3_SHAPE, windows=(4096, None))
    conversation = engine_memory(EngineJob(full, 2, 1, 8192, 1)).conversation
    assert engine_memory(EngineJob(sliding, 2, 1, 8192, 1)).conversation == conversation * 3 // 4
    assert engine_memory(EngineJob(sliding, 2, 1, 4096, 1)).conversation == conversation // 2


# On the host --------------------------------------------------------------------------------------------------------


def test_what_deepspeed_offloads_is_counted_for_every_process_of_the_machine():
    launch = Launch(8, zero_stage=3, optimizer_on_host=True, weights_on_host=True, machines=2)
    assert sizes(trainer_on_host(job(launch), on_cpu=False, versions=2)) == {
        "4 × trainer: process": 4 * PROCESS,
        "4 × trainer: master weights, gradients (32 bit)": 4 * 8 * PARAMETERS // 8,
        "4 × trainer: optimizer states": 4 * 2 * PARAMETERS // 8,
        "4 × trainer: weights (16 bit)": 4 * 2 * 2 * PARAMETERS // 8,  # and those of the reference model
        "2 × published weights (/dev/shm)": 2 * W16,
    }
    distilled = sizes(trainer_on_host(job(launch, strong_tutor=QWEN3_SHAPE), on_cpu=False))
    assert distilled["4 × trainer: weights (16 bit)"] == 4 * 3 * 2 * PARAMETERS // 8


def test_a_critic_is_held_and_not_published():
    parts = [trainer_on_host(job(Launch(1), critic=critic), on_cpu=True, versions=2) for critic in (0, CRITIC)]
    assert total(parts[1]) > total(parts[0])
    assert sizes(parts[1])["2 × published weights (/dev/shm)"] == 2 * W16


def test_on_cpus_everything_is_in_the_machines_memory():
    training = job(Launch(2, zero_stage=2), number_bytes=4, state_bytes=8)
    memory = trainer_memory(training)
    fullest = total(memory.held) - CUDA_CONTEXT + max(total(memory.backward), total(memory.step))
    parts = sizes(trainer_on_host(training, on_cpu=True))
    assert parts["2 × trainer: what the trainer holds and computes"] == 2 * fullest


def test_a_machine_that_is_too_small_is_refused_with_what_to_change():
    offloading = job(Launch(4, zero_stage=2, optimizer_on_host=True))
    parts = trainer_on_host(offloading, on_cpu=False, versions=1)
    assert refuse_host(parts, offloading, total(parts)) is None
    refusal = refuse_host(parts, offloading, total(parts) - 1)
    assert (
        "cannot hold what server and trainer need of it: 48.95 GiB, most of it 4 × trainer: master weights" in refusal
    )
    assert "less offloading" in refusal and "publish_through=disk" in refusal and "fewer processes" in refusal
    assert refuse_host(parts[:1], None, 0).endswith("Ways out: a machine with more memory.")


# Beside the libraries -----------------------------------------------------------------------------------------------


def test_constants_are_those_of_the_libraries():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    assert HEAD_TILE == (TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE)
    zero = DeepSpeedZeroConfig()
    assert (zero.reduce_bucket_size, zero.sub_group_size) == (ZERO_BUCKET, ZERO3_SUB_GROUP)
    assert set(OPTIMIZER_STATES) == set(OPTIMIZERS)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layers_activations_are_what_autograd_keeps_of_it(kind, dtype):
    settings = {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 64,
        "tie_word_embeddings": True,
    }
    two, three = (kept_per_token(AutoConfig.for_model(kind, num_hidden_layers=n, **settings), dtype) for n in (2, 3))
    shape = ModelShape(0, 1, 256, 640, 8, 4, 32, 64, (None,), normed_heads=kind == "qwen3")
    assert layer_activations(shape, dtype.itemsize) == pytest.approx(three - two, rel=0.03)


def kept_per_token(settings, dtype: torch.dtype) -> float:
    """Bytes per token that the forward pass keeps for the backward pass, without weights."""
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation="sdpa").train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros((1, 64), dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 64


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("precision", "rank", "in_float32"), [("bf16", 0, False), ("bf16", 0, True), ("no", 0, False), ("bf16", 4, False)]
)
def test_deepspeed_holds_what_is_reckoned(stage, precision, rank, in_float32, tmp_path):
    """A `rank` above 0 is the rank of an adapter."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = write_config(tmp_path / "model", small | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512})
    flags = ["--config_file", "config/deepspeed/1CPU.yaml", "--num_processes", "2", "--zero_stage", str(stage)]
    flags += ["--mixed_precision", precision, "--gradient_accumulation_steps", "1"]
    output = tmp_path / "held.json"
    program = ["tests/support/deepspeed_memory.py", model, str(output), precision, str(rank), str(in_float32)]
    result = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *flags, *program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    size = 2 if precision == "bf16" else 4
    adapter = AdapterJob(adapter_shape("", model, LoraConfig(rank=rank)).parameters, 0, False) if rank else None
    changes = {"number_bytes": size, "state_bytes": 8, "reference": False, "adapter": adapter}
    changes["float32_gradients"] = in_float32
    memory = trainer_memory(job(Launch(2, zero_stage=stage), read_shape(model), **changes))
    held_sizes = sizes(memory.held)
    assert json.loads(output.read_text()) == {
        "weights": held_sizes[f"weights ({8 * size} bit)"],
        "masters": held_sizes["master weights (32 bit)"],
        "states": held_sizes["optimizer states"],
        "gradients": sizes(memory.backward)["gradients"],
    }
