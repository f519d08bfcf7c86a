"""Checks pretrained models and tokenizers before anything expensive starts, and loads them without running their code.

A model is a folder or a Hub name. Weights must be safetensors, because loading a pickle could run code.

Whether the Hub can be reached is checked once (`why_unreachable`). Otherwise its client would try each file five times:
on a machine without a network, a memory budget of three models would take a minute.
"""

import json
import os
import re
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from classroom_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


ANSWERS_WITHIN_S = 3.0


@cache
def why_unreachable() -> str | None:
    """Why the Hub cannot be reached; None if it can. Sends one request and waits at most `ANSWERS_WITHIN_S` seconds,
    even if name resolution or the connection hangs. The result is cached."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    reasons: list[str | None] = []
    request = threading.Thread(target=lambda: reasons.append(_ask(constants.ENDPOINT)), daemon=True)
    request.start()
    request.join(ANSWERS_WITHIN_S)  # name resolution cannot be interrupted: if it hangs, the daemon thread stays behind
    if not reasons:
        return f"the Hugging Face Hub ({constants.ENDPOINT}) does not answer within {ANSWERS_WITHIN_S:g} s"
    return reasons[0]


def _ask(endpoint: str) -> str | None:
    """Send a request to the Hub. Returns why it failed; None if the Hub answered."""
    import httpx2
    from huggingface_hub.utils import get_session

    try:
        status = get_session().head(endpoint, timeout=ANSWERS_WITHIN_S, follow_redirects=False).status_code
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return f"the Hugging Face Hub ({endpoint}) cannot be reached: {str(error) or type(error).__name__}"
    return f"the Hugging Face Hub ({endpoint}) answers with status {status}" if status >= 500 else None


def read_options(name: str) -> dict[str, Any]:
    """Options for transformers' `from_pretrained`: for a model on the Hub, only the local cache is used if the Hub
    cannot be reached."""
    return {"local_files_only": True} if not Path(name).is_dir() and why_unreachable() else {}


_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
_WEIGHT_INDEX = "model.safetensors.index.json"
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""The keys in config.json for a model's context length. The smallest value is used, as in vLLM."""
_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""The types of rotary embeddings for which the stated context length already includes the scaling."""


def check_model(key: str, name: str) -> None:
    """Refuse a model that cannot be loaded. Reads its configuration and, in a local folder, checks the headers of its
    weight files against the files' sizes.

    Args:
        key: the config key that names the model.

    Raises:
        ConfigError: names the key and the file, and says what to do.
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
        raise ConfigError(f"{key}: the model {name} cannot be loaded: {_error_summary(error)}") from error


def check_context(key: str, name: str, max_length: int) -> None:
    """Refuse a length beyond the model's context, which vLLM would also refuse.

    Args:
        key: the config key that sets the length.

    Raises:
        ConfigError: names both lengths.
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
    """A model's context length in tokens, from its configuration; None if it does not say. The rules are those of vLLM
    (`_get_and_verify_max_len`)."""
    text_config = config.get_text_config()
    model_max_length = getattr(text_config, "model_max_length", None)
    if model_max_length:
        lengths = [model_max_length]
    else:
        lengths = [length for key in _LENGTH_KEYS if (length := getattr(text_config, key, None)) is not None]
    if not lengths:
        return None
    return max(int(min(lengths) * _rope_scaling(text_config)), model_max_length or 0)


def _rope_scaling(text_config: "PretrainedConfig") -> float:
    """The factor by which rotary scaling extends the stated context length, the same for all types of layers."""
    rope_parameters = getattr(text_config, "rope_parameters", None)
    if not isinstance(rope_parameters, dict) or "gemma3" in text_config.model_type:
        return 1.0
    # One dictionary, or one for each type of layer.
    by_layer_type = [value for value in rope_parameters.values() if isinstance(value, dict)] or [rope_parameters]
    scaled = [rope for rope in by_layer_type if rope.get("rope_type", "default") not in _ALREADY_SCALED]
    return next((rope["factor"] for rope in reversed(scaled) if rope.get("factor")), 1.0)


def load_tokenizer(key: str, name: str, **options: Any) -> "PreTrainedTokenizerBase":
    """Load a model's tokenizer. It must have a chat template, and must fit the model, if there is a model config.

    Args:
        key: the config key that names the model.
        options: for transformers' `from_pretrained`.

    Raises:
        ConfigError: if the tokenizer is missing or damaged, has no chat template, or contradicts the model.
    """
    from transformers import AutoTokenizer

    folder = _local_folder(key, name)
    if folder is not None and not any((folder / file).is_file() for file in _VOCABULARY_FILES):
        raise ConfigError(
            f"{key}: {folder} holds no tokenizer (no {', '.join(_VOCABULARY_FILES[:3])} or the like): save the model's "
            "tokenizer into it, with tokenizer.save_pretrained."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: the tokenizer of {name} cannot be loaded: {_error_summary(error)}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{key}: the tokenizer of {name} has no chat template, so it cannot hold a conversation: take an instruct "
            "model, or add a chat_template.jinja."
        )
    if folder is None or (folder / "config.json").is_file():
        _refuse_other_vocabulary(key, name, tokenizer)
    return tokenizer


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Save a tokenizer for both transformers 4 and 5, and so for older vLLM and llama.cpp. Transformers 5 writes a
    class name and a list of tokens that version 4 cannot read; it can itself read the older format."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = _read_json_object(path)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    settings.pop("backend", None)
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def why_unfit(key: str, name: str) -> str | None:
    """Why a model and its tokenizer contradict each other; None if they do not, or if no tokenizer can be read."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        options = read_options(name)
        _refuse_other_vocabulary(key, name, AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError):
        return None  # loading it later reports the error; a tokenizer may also need a package that is not installed
    except ConfigError as error:
        return str(error)
    return None


def _refuse_other_vocabulary(key: str, name: str, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a tokenizer with tokens for which the model has no embedding, and an end or padding token in the model's
    configurations that is not one of the tokenizer's added tokens.

    A special token without an embedding is harmless if the chat template does not contain it, because no text is
    encoded to it. Gemma 3 has such a token, for images.
    """
    from transformers import AutoConfig, GenerationConfig, PretrainedConfig

    options = read_options(name)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False, **options).get_text_config()
    added, embeddings = tokenizer.added_tokens_decoder, getattr(config, "vocab_size", len(tokenizer))
    end_and_padding = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    without_embedding = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= embeddings}
    template = str(tokenizer.chat_template)
    tokens = [
        token
        for token_id, token in sorted(without_embedding.items())
        if token_id in end_and_padding or token_id not in added or not added[token_id].special or token in template
    ]
    if tokens:
        raise ConfigError(
            f"{key}: the tokenizer of {name} has {len(tokenizer)} tokens, but the model has embeddings for "
            f"{embeddings} (vocab_size in its config.json); {tokens[0]!r} has none. Take the tokenizer that belongs to "
            "the model, or give it more with model.resize_token_embeddings(), and save both."
        )
    try:
        generation = GenerationConfig.from_pretrained(name, **options).to_dict()
    except OSError:  # most models have such a file, but none needs it
        generation = {}
    model_config, _ = PretrainedConfig.get_config_dict(name, **options)  # without the defaults of the config class
    model_config |= model_config.get("text_config") or {}
    for file, settings in (("config.json", model_config), ("generation_config.json", generation)):
        for field in ("eos_token_id", "pad_token_id"):
            value = settings.get(field)
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None and token_id >= 0 and token_id not in added and token_id not in end_and_padding:
                    raise ConfigError(
                        f"{key}: {field} is {token_id} in the {file} of {name}, which its tokenizer has as "
                        f"{_spelling(tokenizer, token_id)}, and no marker; the tokenizer's own is "
                        f"{getattr(tokenizer, field)}. One of them belongs to another model: write the right "
                        f"{field} into {file}."
                    )


def _spelling(tokenizer: "PreTrainedTokenizerBase", token_id: int) -> str:
    return repr(tokenizer.convert_ids_to_tokens(token_id)) if token_id < len(tokenizer) else "no token"


def weight_files(name: str) -> list[Path]:
    """The safetensors files of a model in a folder or on the Hub, downloaded if necessary.

    Raises:
        ConfigError: if the model has none.
        OSError: if they cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    if not Path(name).is_dir():
        return _weight_files(Path(snapshot_download(name, allow_patterns=["*.safetensors", _WEIGHT_INDEX])))
    return _weight_files(Path(name))


def check_weights(folder: Path) -> None:
    """Refuse a folder whose safetensors files are missing or damaged.

    Raises:
        ConfigError: names the file.
    """
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is missing or damaged ({error}): copy or save the model again.") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _WEIGHT_INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(_read_json_object(index).get("weight_map", {}).values()))]
    files = sorted(folder.glob("*.safetensors"))
    pickled = sorted(path.name for pattern in _PICKLED_WEIGHTS for path in folder.glob(pattern))
    if not files and pickled:
        raise ConfigError(
            f"{folder} holds its weights as {', '.join(pickled[:3])} only. Such files can run code as they are loaded; "
            "only .safetensors are. Where you trust them, load the model with transformers and save it again with "
            "save_pretrained, which writes safetensors."
        )
    if not files:
        raise ConfigError(f"{folder} holds no .safetensors file.{_describe_content(folder)}")
    return files


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
        _read_json_object(folder / "config.json")
    elif adapter.is_file():
        base = _read_json_object(adapter).get("base_model_name_or_path")
        merged = folder.resolve().parent / "model"  # where this project's runs write the merged model
        alternative = "merge the adapter into it first: peft's merge_and_unload(), then save_pretrained()"
        if merged.is_dir():
            alternative = f"the merged model, which is in {merged}"
        raise ConfigError(
            f"{key}: {folder} holds a PEFT adapter for {base} and no model of its own. Name the base model, or "
            f"{alternative}."
        )
    else:
        raise ConfigError(f"{key}: {folder} holds no config.json, so it is no model.{_describe_content(folder)}")


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged, it is not JSON: {error}. Copy or save the model again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged, it holds no JSON object. Copy or save the model again.")
    return content


def _describe_content(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f" It holds: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}." if names else " It is empty."


def _error_summary(error: Exception) -> str:
    """The first part of a library's message, without its advice to trust a model's code or to install something."""
    return re.split(r"\bYou can \b|Please pass", str(error))[0].strip() or type(error).__name__
