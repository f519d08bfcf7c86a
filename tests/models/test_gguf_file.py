"""GGUF files are read back by transformers, whose reader is another program than the writer, and by the package."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from classroom_rl.errors import ConfigError
from classroom_rl.models.gguf_file import (
    PACKAGE,
    PRE_TOKENIZERS,
    convert,
    encoded_otherwise,
    plain_template,
    pre_tokenizer_of,
    write_gguf,
)
from classroom_rl.models.random_model import write_tiny_chat_model
from classroom_rl.system.shipped import ROOT

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.5, "rms_norm_eps": 1e-5},
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
}
ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama with biases": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True, head_dim=16),
}
TEXTS = ["Where does Ann walk?", "She walked home in 1984, isn't it?\n\n  Yes.", "Ça va? <|im_end|>"]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 512 tokens, whose tokenizer splits text as GPT-2's."""
    return write_tiny_chat_model(tmp_path_factory.mktemp("models") / "chat", TEXTS * 3)


def model_of(config: Any, chat_model: Path, folder: Path) -> Path:
    """A model with random weights, biases included, and eight rows more than tokens."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    shutil.copytree(chat_model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    if config.model_type != "llama":  # transformers splits text as Qwen does for these, whatever the file says
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        rule = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS["qwen2"]}
        (folder / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": rule}), encoding="utf-8")
    config = type(config)(**config.to_dict() | {"vocab_size": len(tokenizer) + 8, "eos_token_id": 2})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_file_is_the_model(name: str, chat_model: Path, tmp_path: Path) -> None:
    folder = model_of(ARCHITECTURES[name], chat_model, tmp_path / "model")
    (tmp_path / "out").mkdir()
    write_gguf(folder, tmp_path / "out/tutor.gguf", "tutor", "float32", pre_tokenizer_of(folder))
    load_options = {"gguf_file": "tutor.gguf", "trust_remote_code": False}
    config = AutoConfig.from_pretrained(tmp_path / "out", **load_options)
    if name == "qwen3":  # transformers does not read the size of its heads, llama.cpp does: attention.key_length
        reader = gguf.GGUFReader(tmp_path / "out/tutor.gguf")
        config.head_dim = reader.get_field("qwen3.attention.key_length").contents()
    if "biases" in name:  # and infers biases from the tensors
        config.attention_bias = True
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", config=config, dtype=torch.float32, **load_options)
    ids = torch.arange(3, 203).reshape(2, 100)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
    tokenizer, restored = (
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(tmp_path / "out", **load_options),
    )
    assert [restored.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert (restored.eos_token_id, restored.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    assert restored.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert "generation" not in restored.chat_template.replace("{#- generation #}", "").replace(
        "add_generation_prompt", ""
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matrices_get_the_type_and_norms_stay_float32(dtype: str, chat_model: Path, tmp_path: Path) -> None:
    write_gguf(chat_model, tmp_path / "tutor.gguf", "tutor", dtype, "gpt-2")
    reader = gguf.GGUFReader(tmp_path / "tutor.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {kinds.pop(name) for name in [*kinds] if "norm" in name} == {"F32"}
    assert set(kinds.values()) == {{"float16": "F16", "bfloat16": "BF16"}[dtype]} and "output.weight" not in kinds
    embeddings = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    expected = AutoModelForCausalLM.from_pretrained(chat_model, use_safetensors=True).get_input_embeddings().weight
    dequantized = torch.tensor(gguf.quants.dequantize(embeddings.data, embeddings.tensor_type))
    assert torch.equal(dequantized, expected.to(getattr(torch, dtype)).float())
    fields = {name: reader.get_field(name).contents() for name in ("tokenizer.ggml.pre", "general.file_type")}
    assert fields == {"tokenizer.ggml.pre": "gpt-2", "general.file_type": {"float16": 1, "bfloat16": 32}[dtype]}


def edited(name: str, **changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | changes), encoding="utf-8")

    return edit


REFUSED = {
    "its architecture is gemma2": edited("config.json", model_type="gemma2"),
    "its positions are scaled": edited(
        "config.json", rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    ),
    "its attention has a window": edited("config.json", layer_types=["full_attention", "sliding_attention"]),
    "its activation is gelu": edited("config.json", hidden_act="gelu"),
    "tokens without embeddings": edited("config.json", vocab_size=100),
    "is no byte-level BPE": edited("tokenizer.json", model={"type": "Unigram", "vocab": []}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_written_is_left_to_llama_cpp(message: str, chat_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(chat_model, tmp_path / "model"))
    REFUSED[message](folder)
    with pytest.raises(ConfigError, match=f"{message}.*--llama-cpp"):
        write_gguf(folder, tmp_path / "tutor.gguf", "tutor", "float32", "gpt-2")


def test_values_that_do_not_fit_the_type_are_refused(chat_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(chat_model, use_safetensors=True)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e6
    folder = Path(shutil.copytree(chat_model, tmp_path / "model"))
    model.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj.*too large for float16"):
        write_gguf(folder, tmp_path / "tutor.gguf", "tutor", "float16", "gpt-2")


def test_without_the_package_the_pinned_one_is_named(chat_model: Path, tmp_path: Path, monkeypatch) -> None:
    assert PACKAGE in [line.split()[0] for line in (ROOT / "requirements-dev.txt").read_text().splitlines()]
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigError, match=f"pip install {PACKAGE}"):
        write_gguf(chat_model, tmp_path / "tutor.gguf", "tutor", "float32", "gpt-2")


def test_the_rule_that_splits_text_is_recognised_or_asked_for(chat_model: Path, world: Path, tmp_path: Path) -> None:
    """The quickstart's rule cuts endings off words, which no rule of llama.cpp's does."""
    assert PRE_TOKENIZERS["qwen2"][0]["pattern"]["Regex"] == PRETOKENIZE_REGEX
    folder = Path(shutil.copytree(chat_model, tmp_path / "model"))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, steps in PRE_TOKENIZERS.items():
        content = json.loads(backend.to_str())
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        content["model"]["ignore_merges"] = name == "llama-bpe"
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        assert pre_tokenizer_of(folder) == name and encoded_otherwise(folder, name, TEXTS) == 0
    edited("tokenizer.json", model=content["model"] | {"ignore_merges": False})(folder)
    with pytest.raises(ConfigError, match="none of gpt-2, smollm, qwen2, llama-bpe.*--pre-tokenizer"):
        pre_tokenizer_of(folder)
    with pytest.raises(ConfigError, match=r"\(\?<="):
        pre_tokenizer_of(world / "blank")
    texts = ["He walked.", "She walks with cats.", "Is it?"]
    assert 0 < encoded_otherwise(world / "blank", "gpt-2", texts) < 3


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("a\n{%- generation %}b{% endgeneration -%} c", "a\n{#- generation #}b{# generation -#} c"),
        ("{%generation%}{% if add_generation_prompt %}", "{# generation #}{% if add_generation_prompt %}"),
    ],
)
def test_marks_of_what_assistants_say_become_comments(given: str, plain: str) -> None:
    assert plain_template(given) == plain


def test_the_converter_of_llama_cpp_is_run_and_its_failure_told(chat_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no convert_hf_to_gguf\.py"):
        convert(tmp_path, chat_model, tmp_path / "tutor.gguf", "bfloat16")
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text("import sys, pathlib; pathlib.Path(sys.argv[3]).write_text(' '.join(sys.argv[1:]))")
    convert(tmp_path, chat_model, tmp_path / "tutor.gguf", "bfloat16")
    expected = f"{chat_model} --outfile {tmp_path / 'tutor.gguf'} --outtype bf16"
    assert (tmp_path / "tutor.gguf").read_text() == expected
    script.write_text("raise SystemExit('no such model')")
    with pytest.raises(ConfigError, match="failed: no such model"):
        convert(tmp_path, chat_model, tmp_path / "tutor.gguf", "bfloat16")
