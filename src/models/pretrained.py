"""Checks other people's models and tokenizers before anything heavy starts, and loads them without running their code.

A model is a folder or a Hub name. Weights are safetensors: loading a pickle could run code.
"""

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from ..errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
_INDEX = "model.safetensors.index.json"
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""The config keys for a model's context length. The smallest value counts, as in vLLM."""
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Types of rotary embeddings for which the stated context length already includes the scaling."""


def check_model(key: str, name: str) -> None:
    """Refuse a model that cannot be loaded. Reads its configuration and, in a local folder, checks the headers of its
    weight files against the files' sizes.

    Args:
        key: the config key that names the model.

    Raises:
        ConfigError: with key, file, and what to do.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    folder = _local_folder(key, name)
    if folder is not None:
        _check_config_file(key, folder)
        check_weights(folder)
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"{key}: the model {name} cannot be loaded: {_without_advice(error)}") from error


def check_context(key: str, name: str, max_length: int) -> None:
    """Refuse a length beyond the model's context, which vLLM would refuse, too.

    Args:
        key: the config key that sets the length.

    Raises:
        ConfigError: with both lengths.
    """
    from transformers import AutoConfig

    refusal = too_long_for(key, name, AutoConfig.from_pretrained(name, trust_remote_code=False), max_length)
    if refusal is not None:
        raise ConfigError(refusal)


def too_long_for(key: str, name: str, config: "PretrainedConfig", max_length: int) -> str | None:
    """Why a model cannot have a context of this length; None if it can, or if VLLM_ALLOW_LONG_MAX_MODEL_LEN is set."""
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true")
    context = context_length(config)
    if allowed or context is None or max_length <= context:
        return None
    return (
        f"{key} is {max_length}, but {name} was made for at most {context} tokens (by its config.json, the scaling of "
        f"its positions included): set {key}={context} or less, and limit prompts and conversations to that, or take a "
        "model with a longer context."
    )


def context_length(config: "PretrainedConfig") -> int | None:
    """A model's context length in tokens, by its configuration; None if that does not say. The rules are vLLM's."""
    text = config.get_text_config()
    whole = getattr(text, "model_max_length", None)
    stated = [whole] if whole else [length for each in _LENGTHS if (length := getattr(text, each, None)) is not None]
    if not stated:
        return None
    return max(int(min(stated) * _scaling(text)), whole or 0)


def _scaling(text: "PretrainedConfig") -> float:
    """The factor by which rotary scaling extends the stated context length, the same for layers of all kinds."""
    positions = getattr(text, "rope_parameters", None)
    if not isinstance(positions, dict) or "gemma3" in text.model_type:
        return 1.0
    kinds = [each for each in positions.values() if isinstance(each, dict)] or [positions]
    scaled = [each for each in kinds if each.get("rope_type", "default") not in _SCALED_ALREADY]
    return next((each["factor"] for each in reversed(scaled) if each.get("factor")), 1.0)


def load_tokenizer(key: str, name: str, **options: Any) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model, which must have a chat template.

    Args:
        key: the config key that names the model.
        options: for transformers' `from_pretrained`.

    Raises:
        ConfigError: if the tokenizer is missing or damaged, or has no chat template.
    """
    from transformers import AutoTokenizer

    folder = _local_folder(key, name)
    if folder is not None and not any((folder / each).is_file() for each in _VOCABULARIES):
        raise ConfigError(
            f"{key}: {folder} holds no tokenizer (no {', '.join(_VOCABULARIES[:3])} or the like): save the model's "
            "tokenizer into it, with tokenizer.save_pretrained."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: the tokenizer of {name} cannot be loaded: {_without_advice(error)}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{key}: the tokenizer of {name} has no chat template, so it cannot hold a conversation: take an instruct "
            "model, or add a chat_template.jinja."
        )
    return tokenizer


def weight_files(name: str) -> list[Path]:
    """The safetensors files of a model in a folder or on the Hub, downloaded if necessary.

    Raises:
        ConfigError: if it has none.
        OSError: if they cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    if not Path(name).is_dir():
        return _weight_files(Path(snapshot_download(name, allow_patterns=["*.safetensors", _INDEX])))
    return _weight_files(Path(name))


def check_weights(folder: Path) -> None:
    """Refuse a folder whose safetensors files are missing or damaged.

    Raises:
        ConfigError: with the file.
    """
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is missing or damaged ({error}): copy or save the model again.") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(_read_object(index).get("weight_map", {}).values()))]
    found = sorted(folder.glob("*.safetensors"))
    pickled = sorted(path.name for pattern in _PICKLED_WEIGHTS for path in folder.glob(pattern))
    if not found and pickled:
        raise ConfigError(
            f"{folder} holds its weights as {', '.join(pickled[:3])} only. Such files can run code as they are loaded; "
            "only .safetensors are. Where you trust them, load the model with transformers and save it again with "
            "save_pretrained, which writes safetensors."
        )
    if not found:
        raise ConfigError(f"{folder} holds no .safetensors file.{_what_it_holds(folder)}")
    return found


def _local_folder(key: str, name: str) -> Path | None:
    """The local folder of a model; None for a name on the Hub."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{key} is {name}, which is a file. A model is a folder, or a name on the Hub.")
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"{key} is {name}, but there is no such folder (seen from {Path.cwd()}), and it is no name on the Hub "
            "(owner/model)."
        )
    return None


def _check_config_file(key: str, folder: Path) -> None:
    adapter = folder / "adapter_config.json"
    if (folder / "config.json").is_file():
        _read_object(folder / "config.json")
    elif adapter.is_file():
        base = _read_object(adapter).get("base_model_name_or_path")
        merged = folder.resolve().parent / "model"  # where this project's runs write the merged model
        way = "merge the adapter into it first: peft's merge_and_unload(), then save_pretrained()"
        if merged.is_dir():
            way = f"the merged model, which is in {merged}"
        raise ConfigError(
            f"{key}: {folder} holds a PEFT adapter for {base} and no model of its own. Name the base model, or {way}."
        )
    else:
        raise ConfigError(f"{key}: {folder} holds no config.json, so it is no model.{_what_it_holds(folder)}")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged, it is not JSON: {error}. Copy or save the model again.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is damaged, it holds no JSON object. Copy or save the model again.")
    return found


def _what_it_holds(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f" It holds: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}." if names else " It is empty."


def _without_advice(error: Exception) -> str:
    """A library's message without its advice to trust a model's code or to install something."""
    return re.split(r"\bYou can \b|Please pass", str(error))[0].strip() or type(error).__name__
