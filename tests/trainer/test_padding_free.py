"""Rows without padding give the log-probs, values, losses and gradients that padded rows give."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    FalconH1Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.problem import Problem
from classroom_rl.trainer.batch import NO_PADDING, TRIMMED, Batch
from classroom_rl.trainer.log_probs import PackedRow
from classroom_rl.trainer.padding_free import attend_within_sequences
from tests.support.offline_trainer import conversation, offline_trainer

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=False),
    "smollm2": LlamaConfig(**SHAPE, num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
}
LORA = "teacher_model.lora={enable: true, rank: 4, dropout: 0}"


@pytest.fixture(scope="module")
def folders(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind with random weights, and a tokenizer."""
    tokenizer, paths = AutoTokenizer.from_pretrained(world / "blank"), {}
    for name, config in MODELS.items():
        paths[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(7)
        config.vocab_size = len(tokenizer)
        AutoModelForCausalLM.from_config(config).save_pretrained(paths[name])
        tokenizer.save_pretrained(paths[name])
    return paths


def play(index: int, problem: Problem) -> ConversationRecord:
    """Conversations of uneven length: every other one is cut, and one prompt is longer."""
    record = conversation(index, problem, seed=3)
    length = len(record.completion_ids) - 3 * index if index % 2 else len(record.completion_ids)
    cut = {name: getattr(record, name)[:length] for name in ("completion_ids", "mask", "logprobs")}
    return record.model_copy(update={**cut, "prompt_ids": record.prompt_ids * (4 if index == 5 else 1)})


def passes(trainer: Any) -> tuple[list[Batch], list[float], list[torch.Tensor]]:
    """The micro-batches of one batch, and the loss and the gradients of two passes over it; before the batch and
    between the passes the weights move, in the same way every time."""
    draw, losses, gradients = torch.Generator().manual_seed(0), [], []

    @torch.no_grad()
    def move() -> None:
        for weight in (parameter for parameter in trainer.model.parameters() if parameter.requires_grad):
            weight += 0.02 * torch.randn(weight.shape, generator=draw)

    move()
    batch = trainer.batch()
    for _ in range(2):
        loss, named_gradients = trainer.loss_and_gradients(batch)
        losses.append(loss)
        gradients.append(torch.cat([named_gradients[name].flatten() for name in sorted(named_gradients)]))
        move()
    return batch, losses, gradients


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        *((model, ["train.mu=2", "train.beta=0.1"]) for model in MODELS),
        ("qwen3", ["train.mu=1", "train.gradient_checkpointing=true"]),
        ("qwen3", ["train.mu=2", "train.beta=0.1", LORA, "train.gradient_checkpointing=true"]),
        ("smollm2", ["train.mu=2", "train.beta=0.1", "train.max_tokens_per_micro_batch=150"]),
        ("qwen2", ["train.mu=2", "train.beta=0.1", "train.algorithm=ppo", "train.ppo.head=mlp"]),
        ("llama", ["train.importance_sampling_level=sequence", "train.mu=2"]),
    ],
)
def test_log_probs_values_and_gradients_are_those_of_padded_rows(
    folders: dict[str, Path], tmp_path: Path, model: str, overrides: list[str]
) -> None:
    """In float64, up to what is float32 in the head of TRL and in the critic."""
    trainers = [
        offline_trainer(tmp_path / value, folders[model], [*overrides, f"train.padding_free={value}"], play)
        for value in ("false", "true")
    ]
    for trainer in trainers:
        trainer.model.double()
        if "train.gradient_checkpointing=true" in overrides:  # otherwise `Trainer.train` switches it on
            trainer.model.gradient_checkpointing_enable()
    (padded, *expected), (free, *actual) = (passes(trainer) for trainer in trainers)
    assert [trainer.padding for trainer in trainers] == [TRIMMED, NO_PADDING]
    assert actual[0] == pytest.approx(expected[0], abs=1e-6)
    for own, other in zip(actual[1], expected[1], strict=True):
        assert (own - other).norm() < 1e-6 * other.norm()
    if "max_tokens" in overrides[-1]:
        assert len(free) < len(padded), "more rows fit into as many tokens"
        return
    for own, other in zip(free, padded, strict=True):
        for name in ("old_logps_BT", "ref_logps_BT", "old_values_BT"):
            free_values, padded_values = getattr(own, name), getattr(other, name)
            assert (free_values is None) == (padded_values is None)
            if free_values is not None:
                real = own.completion_mask_BT * own.wanted_BT.any(dim=1, keepdim=True)
                assert ((free_values - padded_values) * real).abs().max() < 1e-5 and (free_values * real).any(), name


def test_a_row_says_where_its_sequences_begin() -> None:
    """The second sample has nothing that is trained on."""
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 0]])
    attention, wanted = (ids > 0).long(), torch.tensor([[True, False], [False, False], [True, False]])
    attention[2, 0] = 1
    row = PackedRow.of(attention, wanted)
    inputs = {
        name: value if isinstance(value, int) else value.tolist() for name, value in row.inputs(ids, attention).items()
    }
    assert inputs == {
        **{"input_ids": [[1, 2, 3, 8, 9, 10]], "position_ids": [[0, 1, 2, 0, 1, 2]]},
        **dict.fromkeys(["cu_seq_lens_q", "cu_seq_lens_k"], [0, 3, 6]),
        **dict.fromkeys(["max_length_q", "max_length_k"], 3),
    }
    expected = ids * attention
    expected[1] = 0
    assert torch.equal(row.undo(row.apply(ids)), expected)


def on_meta(config: Any, attention: str = "sdpa") -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = attention
    return model


LAYERS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "use_sliding_window": True}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
FLASH = "flash_attention_2"


@pytest.mark.parametrize(
    ("config", "attention", "problem"),
    [
        (Qwen3Config(**SHAPE), "sdpa", None),
        (Qwen3Config(**SHAPE), FLASH, None),
        (Qwen3Config(**SHAPE, **LAYERS), FLASH, None),
        (Qwen3Config(**SHAPE, **LAYERS), "sdpa", "looks back through a window, which only flash attention keeps"),
        (MistralConfig(**SHAPE, sliding_window=4), "sdpa", "looks back through a window"),
        (Qwen3Config(**SHAPE), "eager", "attention is eager, which is neither sdpa nor flash"),
        (Qwen3Config(**SHAPE), "flex_attention", "attention is flex_attention"),
        (LlamaConfig(**SHAPE, rope_parameters=DYNAMIC), FLASH, "rotary positions depend on the length"),
        (Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]), FLASH, "layers of conv"),
        (FalconH1Config(**SHAPE), FLASH, "state that would go on|layers of"),
        (FalconConfig(**SHAPE), "sdpa", "does not say to its attention where sequences begin"),
    ],
)
def test_a_model_whose_sequences_would_see_each_other_is_refused(
    config: Any, attention: str, problem: str | None
) -> None:
    model = on_meta(config, attention)
    reason = attend_within_sequences(model)
    changed = problem is None and attention == "sdpa"
    assert model.config._attn_implementation == ("sdpa_of_each_sequence" if changed else attention)
    assert reason is None if problem is None else re.search(problem, reason)


def test_a_refused_model_names_the_key(folders: dict[str, Path], tmp_path: Path) -> None:
    eager = ["train.padding_free=true", "train.attn_implementation=eager"]
    with pytest.raises(ConfigError, match="train.padding_free is true, but .*its attention is eager.*Set it to false"):
        offline_trainer(tmp_path, folders["qwen3"], eager)
