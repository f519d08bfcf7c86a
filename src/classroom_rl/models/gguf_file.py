"""Writes a model as a GGUF file for llama.cpp, Ollama and LM Studio: Llama, Qwen2 and Qwen3, unquantized. All others
are left to the converter of a clone of llama.cpp (`convert`), whose layout this is."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from classroom_rl.errors import ConfigError
from classroom_rl.models.pretrained import weight_files

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PretrainedConfig

PACKAGE = "gguf==0.19.0"
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The types of weights, and their names at llama.cpp."""
_OTHERWISE = "Convert it with llama.cpp: --llama-cpp and the folder of a clone."
_CONVERTER, _CONVERTER_TIMEOUT_S = "convert_hf_to_gguf.py", 7200
_GENERATION_MARK = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")

_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_by(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _GPT2 | {"use_regex": False}]


PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "qwen2": _split_by(_WORDS),
    "llama-bpe": _split_by(_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")),
}
"""llama.cpp's name of a rule that splits text before merges → the same rule in tokenizer.json. A GGUF file can only
name a rule; llama.cpp has the rules in its code."""
_WITHOUT_MERGES = "llama-bpe"
"""The rule with which llama.cpp takes a part of the text that is a token as it is (`ignore_merges`)."""


def convert(llama_cpp: Path, model: Path, file: Path, dtype: str) -> None:
    """Write a GGUF file with the converter of a clone of llama.cpp.

    Raises:
        ConfigError: if the converter is not there or fails.
    """
    script = llama_cpp / _CONVERTER
    if not script.is_file():
        raise ConfigError(f"--llama-cpp is {llama_cpp}, which holds no {_CONVERTER}: name a clone of llama.cpp.")
    command = [sys.executable, str(script), str(model), "--outfile", str(file), "--outtype", DTYPES[dtype]]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_CONVERTER_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{script} did not end within {_CONVERTER_TIMEOUT_S} s.") from error
    if result.returncode != 0 or not file.is_file():
        raise ConfigError(f"{script} failed: {(result.stderr or result.stdout).strip()[-1500:]}")


def write_gguf(model: Path, file: Path, name: str, dtype: str, pre_tokenizer: str) -> None:
    """Write a model's folder as a GGUF file. Norms and biases are always float32.

    Args:
        name: the model's, for the metadata.
        dtype: a key of `DTYPES`, of the matrices.
        pre_tokenizer: a key of `PRE_TOKENIZERS`.

    Raises:
        ConfigError: if `gguf` is not installed, or the model has something that this function does not write.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"Writing GGUF needs the package gguf: pip install {PACKAGE}") from error
    import numpy as np
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    _refuse_other_models(config)
    writer = gguf.GGUFWriter(None, config.model_type)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type({"float32": 0, "float16": 1, "bfloat16": 32}[dtype])  # gguf.LlamaFileType
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_sizes(writer, config)
    _add_tokenizer(writer, model, config.vocab_size, pre_tokenizer)
    tensors = [(*tensor, "float32" if len(tensor[2]) == 1 else dtype) for tensor in _tensors(model, config)]
    for _, _, shape, gguf_name, kind in tensors:
        raw_dtype, size = getattr(gguf.GGMLQuantizationType, DTYPES[kind].upper()), 4 if kind == "float32" else 2
        writer.add_tensor_info(gguf_name, shape, np.float32, math.prod(shape) * size, raw_dtype=raw_dtype)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for path, key, _, _, kind in tensors:
        writer.write_tensor_data(_bytes_of(path, key, config, kind))
    writer.close()


def _refuse_other_models(config: "PretrainedConfig") -> None:
    rope, activation = getattr(config, "rope_parameters", None) or {}, getattr(config, "hidden_act", None)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    reasons = {
        f"its architecture is {config.model_type}": config.model_type not in ("llama", "qwen2", "qwen3"),
        "its positions are scaled": rope.get("rope_type", "default") != "default" or "partial_rotary_factor" in rope,
        "its attention has a window": layers != {"full_attention"},
        f"its activation is {activation}": activation != "silu",
        "it is quantized": hasattr(config, "quantization_config"),
    }
    if unsupported := [reason for reason, applies in reasons.items() if applies]:
        raise ConfigError(f"This program does not write such a model as GGUF: {', '.join(unsupported)}. {_OTHERWISE}")


def _add_sizes(writer: "GGUFWriter", config: "PretrainedConfig") -> None:
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_size)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_vocab_size(config.vocab_size)


def _tensors(model: Path, config: "PretrainedConfig") -> Iterator[tuple[Path, str, Sequence[int], str]]:
    """The file, name, shape and GGUF name of every tensor. A head that is tied to the embeddings is left out, as
    llama.cpp expects."""
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for path in weight_files(str(model)):
        with safe_open(path, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118, it is no dictionary
                gguf_name = names.get_name(key, (".weight", ".bias"))
                if gguf_name is None:
                    raise ConfigError(f"{path} holds {key}, for which GGUF has no name. {_OTHERWISE}")
                if key != "lm_head.weight" or not config.tie_word_embeddings:
                    yield path, key, weights.get_slice(key).get_shape(), gguf_name


def _bytes_of(path: Path, key: str, config: "PretrainedConfig", dtype: str) -> Any:
    """A tensor's values in this type, as an array of bytes.

    Rows of a Llama's queries and keys are put into llama.cpp's order: it rotates neighbouring pairs, where transformers
    rotates the first half of a head with the second.
    """
    import torch

    with safe_open(path, framework="pt") as weights:
        tensor = weights.get_tensor(key)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
    if config.model_type == "llama" and heads is not None:
        tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    converted = tensor.to(getattr(torch, dtype)).contiguous()
    if not torch.isfinite(converted).all():
        raise ConfigError(f"{key} has values that are not finite, or too large for {dtype}: choose another --dtype.")
    return converted.view(torch.uint8).numpy()


# Tokenizer --------------------------------------------------------------------------------------------------------


def _add_tokenizer(writer: "GGUFWriter", model: Path, rows: int, pre_tokenizer: str) -> None:
    """Add tokens, merges, special ids and chat template. llama.cpp wants a token for each of the embeddings' `rows`."""
    import gguf

    content = _read_tokenizer(model)
    entries = {index: (token, gguf.TokenType.NORMAL) for token, index in content["model"]["vocab"].items()}
    for added_token in content["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added_token["special"] else gguf.TokenType.USER_DEFINED
        entries[added_token["id"]] = (added_token["content"], kind)
    if max(entries) >= rows:
        raise ConfigError(f"The tokenizer has tokens without embeddings: {entries[max(entries)][0]!r}. {_OTHERWISE}")
    unused = ((f"[PAD{index}]", gguf.TokenType.UNUSED) for index in range(rows))
    tokens, kinds = zip(*(entries.get(index, padding) for index, padding in enumerate(unused)), strict=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special = gguf.SpecialVocab(model, load_merges=True, n_vocab=rows)
    special.add_special_token.setdefault("bos", False)  # by default llama.cpp begins a text with a Llama 3's
    if isinstance(special.chat_template, str):
        special.chat_template = plain_template(special.chat_template)
    special.add_to_gguf(writer, quiet=True)


def plain_template(template: str) -> str:
    """A chat template without the marks around what assistants say (`{% generation %}`), which trainings need and some
    readers do not know. Comments take their place, so that white space is trimmed as before."""
    return _GENERATION_MARK.sub(r"{#\1 generation \2#}", template)


def pre_tokenizer_of(model: Path) -> str:
    """llama.cpp's name of the rule by which the tokenizer splits text.

    Raises:
        ConfigError: if it has none.
    """
    content = _read_tokenizer(model)
    rule, ignores_merges = _comparable(_steps(content)), content["model"].get("ignore_merges", False)
    for name, steps in PRE_TOKENIZERS.items():
        if _comparable(steps) == rule and ignores_merges == (name == _WITHOUT_MERGES):
            return name
    raise ConfigError(
        f"The tokenizer splits text by a rule that is none of {', '.join(PRE_TOKENIZERS)}: "
        f"{json.dumps(_steps(content), ensure_ascii=False)[:500]}. Name the nearest with --pre-tokenizer: texts that "
        "get other tokens by it than in the training are counted. Or let llama.cpp convert it (--llama-cpp)."
    )


def encoded_otherwise(model: Path, pre_tokenizer: str, texts: Sequence[str]) -> int:
    """How many of the texts get other tokens by one of `PRE_TOKENIZERS` than by the tokenizer's own rule."""
    from tokenizers import Tokenizer

    content = _read_tokenizer(model)
    original = Tokenizer.from_str(json.dumps(content))
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre_tokenizer]}
    content["model"]["ignore_merges"] = pre_tokenizer == _WITHOUT_MERGES
    converted = Tokenizer.from_str(json.dumps(content))
    return sum(original.encode(text).ids != converted.encode(text).ids for text in texts)


def _read_tokenizer(model: Path) -> dict[str, Any]:
    """tokenizer.json.

    Raises:
        ConfigError: if it holds no byte-level BPE.
    """
    path = model / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"model": {}}
    if content["model"].get("type") != "BPE" or all(step["type"] != "ByteLevel" for step in _steps(content)):
        raise ConfigError(f"The tokenizer is no byte-level BPE, the only kind that this program writes. {_OTHERWISE}")
    return content


def _steps(content: dict[str, Any]) -> list[dict[str, Any]]:
    rule = content.get("pre_tokenizer") or {"type": None}
    return rule["pretokenizers"] if rule["type"] == "Sequence" else [rule]


def _comparable(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps without the key that changes no token."""
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
