"""Models with random weights, in the shapes of real ones."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from classroom_rl.memory.sources import read_shape
from classroom_rl.models.random_model import SHAPES, draw_weights, write_shape, write_tiny_chat_model


@pytest.mark.parametrize(("name", "parameters"), [("Qwen3-0.6B", 596_049_920), ("Qwen3-4B", 4_022_468_096)])
def test_shapes_have_the_parameters_of_the_real_models(name: str, parameters: int, world: Path, tmp_path: Path) -> None:
    write_shape(SHAPES[name], world / "blank", tmp_path / "m")
    shape = read_shape(str(tmp_path / "m"))
    assert (shape.parameters, shape.vocabulary) == (parameters, 151_936)


def test_a_models_tokens_all_have_a_text_and_texts_are_encoded_as_before(world: Path, tmp_path: Path, lessons) -> None:
    write_shape(SHAPES["tiny"], world / "blank", tmp_path / "m")
    draw_weights(tmp_path / "m", "cpu")
    extended, original = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "m", world / "blank"))
    assert len(extended) == SHAPES["tiny"]["vocab_size"] > len(original)
    for text in (*lessons[:5], "<|im_start|>assistant\nGood . <end_of_conversation><|im_end|>", "žluťoučký kůň"):
        assert extended(text).input_ids == original(text).input_ids
    assert extended.eos_token_id == original.eos_token_id and extended.chat_template == original.chat_template
    texts = [extended.decode([token]) for token in range(len(original), len(extended))]
    assert len(set(texts)) == len(texts) and all(len(text) == 4 for text in texts)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.dtype == torch.bfloat16 and model.get_input_embeddings().weight.float().std() > 0.01


def test_equal_seeds_give_equal_tiny_models(tmp_path: Path) -> None:
    weights = [
        AutoModelForCausalLM.from_pretrained(
            write_tiny_chat_model(tmp_path / name, ["Hello."], seed=seed)
        ).lm_head.weight
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
