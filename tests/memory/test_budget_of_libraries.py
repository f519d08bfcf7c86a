"""The memory budget against the libraries: constants, what autograd keeps of a layer, and what DeepSpeed holds."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from classroom_rl.config.base import LoraConfig
from classroom_rl.config.values import OPTIMIZERS
from classroom_rl.memory.budget import (
    HEAD_TILE,
    OPTIMIZER_STATES,
    AdapterJob,
    Launch,
    ModelShape,
    layer_activations,
    trainer_memory,
)
from classroom_rl.memory.sources import read_shape
from classroom_rl.models.lora import adapter_shape
from tests.conftest import ROOT
from tests.memory.test_budget import job, sizes, write_config


def test_constants_are_those_of_the_libraries():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    from classroom_rl.memory import budget as memory_budget

    assert HEAD_TILE == (TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE)
    assert DeepSpeedZeroConfig().reduce_bucket_size == memory_budget._ZERO_BUCKET
    assert DeepSpeedZeroConfig().sub_group_size == memory_budget._ZERO3_SUB_GROUP
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
    kept = [kept_per_token(AutoConfig.for_model(kind, num_hidden_layers=n, **settings), dtype) for n in (2, 3)]
    shape = ModelShape(0, 1, 256, 640, 8, 4, 32, 64, (None,), normed_heads=kind == "qwen3")
    assert layer_activations(shape, dtype.itemsize) == pytest.approx(kept[1] - kept[0], rel=0.03)


def kept_per_token(settings, dtype: torch.dtype) -> float:
    """Bytes per token that the forward pass keeps for the backward pass, without weights."""
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation="sdpa").train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros((1, 64), dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 64


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("precision", "rank"), [("bf16", 0), ("no", 0), ("bf16", 4)])
def test_deepspeed_holds_what_is_reckoned(stage, precision, rank, tmp_path):
    """A `rank` above 0 is the rank of an adapter."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = write_config(tmp_path / "model", small | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512})
    flags = ["--config_file", "config/deepspeed/1CPU.yaml", "--num_processes", "2", "--zero_stage", str(stage)]
    flags += ["--mixed_precision", precision, "--gradient_accumulation_steps", "1"]
    output = tmp_path / "held.json"
    program = ["tests/support/deepspeed_memory.py", model, str(output), precision, str(rank)]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *flags, *program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    size = 2 if precision == "bf16" else 4
    launch = Launch(2, zero_stage=stage)
    adapter = AdapterJob(adapter_shape("", model, LoraConfig(rank=rank)).parameters, 0, False) if rank else None
    small_job = job(read_shape(model), launch, number_bytes=size, state_bytes=8, reference=False, adapter=adapter)
    memory = trainer_memory(small_job)
    held = sizes(memory.held)
    assert json.loads(output.read_text()) == {
        "weights": held[f"weights ({8 * size} bit)"],
        "masters": held["master weights (32 bit)"],
        "states": held["optimizer states"],
        "gradients": sizes(memory.backward)["gradients"],
    }
