"""A model of known shape, and the configurations and jobs that the budget is computed for."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import classroom_rl.memory.report
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.memory.budget import GIB, Launch, ModelShape, Part, TrainerJob
from tests.support.configs import training

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# Embedding (tied to the head) 151936 × 2560 = 388,956,160. A layer: queries 2560 × 4096, keys and values
# 2 × 2560 × 1024, result 4096 × 2560, MLP 3 × 2560 × 9728, norms 2 × 2560 + 2 × 128: 100,930,816. Last norm 2560.
PARAMETERS = 4_022_468_096  # 388,956,160 + 36 × 100,930,816 + 2,560
QWEN3_SHAPE = ModelShape(
    parameters=PARAMETERS,
    layers=36,
    hidden=2560,
    mlp=9728,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    windows=(None,) * 36,
    normed_heads=True,
)
# Rank 16, in every layer: queries 16 × (2560 + 4096), keys and values 2 × 16 × (2560 + 1024), result
# 16 × (4096 + 2560), gate and up 2 × 16 × (2560 + 9728), down 16 × (9728 + 2560): 917,504.
ADAPTER = 36 * 917_504
# The width of its matrices' inputs, in every layer: 5 × 2560 for queries, keys, values, gate and up, 4096 and 9728.
ADAPTER_INPUTS = 36 * (5 * 2560 + 4096 + 9728)


def write_config(folder: Path, changes: dict) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B | changes))
    return str(folder)


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    return write_config(tmp_path / "Qwen3-4B", {})


def job(launch: Launch, shape: ModelShape = QWEN3_SHAPE, **changes) -> TrainerJob:
    """A training in bfloat16 with paged_adamw_8bit, a reference model, gradient checkpointing, and micro-batches of
    2 × 8192 tokens."""
    defaults = {"number_bytes": 2, "state_bytes": 2, "reference": True, "checkpointing": True, "tokens": 16384}
    return TrainerJob(shape=shape, launch=launch, **(defaults | changes))


def sizes(parts: Iterable[Part]) -> dict[str, int]:
    return {part.name: part.size for part in parts}


def small_training(model: str, *overrides: str) -> TrainRLConfig:
    """Teacher and student are this model, with 0.25 of a GPU each; the training is that of `job`."""
    engine = "{dtype: auto, max_length: 8192, max_num_seqs: 256, gpu_memory_utilization: 0.25}"
    return training(
        f"teacher_model={{model_name_or_path: {model}, vllm: {engine}}}",
        f"student_model={{model_name_or_path: {model}, vllm: {engine}}}",
        "train.dtype=bfloat16",
        "train.optimizer=paged_adamw_8bit",
        "train.beta=0.001",
        "train.gradient_checkpointing=true",
        "train.per_device_train_batch_size=2",
        "generation.max_tokens_in_conversation=8192",
        *overrides,
    )


def size_of(lines: list[str], name: str) -> str:
    """The size in the first line of a report with this name."""
    return next(line for line in lines if name in line).rpartition("  ")[2].strip()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the machine so many GiB of memory, and a GPU of so many GiB or none."""

    def give(gpu: int | None, memory: int = 10_000) -> None:
        gpus = [] if gpu is None else [gpu * GIB]
        monkeypatch.setattr(classroom_rl.memory.report, "like_gpus", lambda: gpus)
        monkeypatch.setattr(classroom_rl.memory.report, "machine_memory", lambda: memory * GIB)

    return give
