"""Checks other people's models and tokenizers before anything heavy starts, and loads them without running their code.

A model is a folder or a Hub name. Weights are safetensors: loading a pickle could run code.

Without the check, the Hub's client tries each file five times: on a machine without a network, a memory budget of three
models would take a minute.
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
    also if name resolution or the connection hangs. The result is cached."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    reasons: list[str | None] = []
    asking = threading.Thread(target=lambda: reasons.append(_ask(constants.ENDPOINT)), daemon=True)
    asking.start()
    asking.join(ANSWERS_WITHIN_S)  # a hanging name resolution cannot be interrupted; the daemon thread is left behind
    if not reasons:
        return f"the Hugging Face Hub ({constants.ENDPOINT}) does not answer within {ANSWERS_WITHIN_S:g} s"
    return reasons[0]


def _ask(endpoint: str) -> str | None:
    import httpx2
    from huggingface_hub.utils import get_session

    try:
        status = get_session().head(endpoint, timeout=ANSWERS_WITHIN_S, follow_redirects=False).status_code
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return f"the Hugging Face Hub ({endpoint}) cannot be reached: {str(error) or type(error).__name__}"
    return f"the Hugging Face Hub ({endpoint}) answers with status {status}" if status >= 500 else None


def read_options(name: str) -> dict[str, Any]:
    """Options for transformers' `from_pretrained`: only the local cache is used for a model on a Hub that cannot be
    reached."""
    return {"local_files_only": True} if not Path(name).is_dir() and why_unreachable() else {}


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
    """Load the tokenizer of a model, which must have a chat template, and fit the model if its configuration is there.

    Args:
        key: the config key that names the model.
        options: for transformers' `from_pretrained`.

    Raises:
        ConfigError: if the tokenizer is missing or damaged, has no chat template, or contradicts the model.
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
    if folder is None or (folder / "config.json").is_file():
        _refuse_other_vocabulary(key, name, tokenizer)
    return tokenizer


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Save a tokenizer for transformers 4 and 5 alike, and so for older vLLM and llama.cpp: transformers 5 names a
    class and a list of tokens in a way that version 4 cannot read, and reads the earlier way itself."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = _read_object(path)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    settings.pop("backend", None)
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def why_unfit(key: str, name: str) -> str | None:
    """Why a model and its tokenizer contradict each other; None if they do not, or if there is no tokenizer to read."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        options = read_options(name)
        _refuse_other_vocabulary(key, name, AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError):
        return None  # the start says what is wrong with it; a tokenizer may also need a package that is not here
    except ConfigError as error:
        return str(error)
    return None


def _refuse_other_vocabulary(key: str, name: str, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a tokenizer with tokens for which the model has no embedding, and an end or padding token in the model's
    configurations that is none of the tokenizer's. A special token without an embedding is harmless if the chat
    template does not write it: no text becomes one. Gemma 3 has such a token, for images."""
    from transformers import AutoConfig, GenerationConfig, PretrainedConfig

    options = read_options(name)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False, **options).get_text_config()
    added, rows = tokenizer.added_tokens_decoder, getattr(config, "vocab_size", len(tokenizer))
    needed = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    template = str(tokenizer.chat_template)
    used = [
        token
        for number, token in sorted(beyond.items())
        if number in needed or number not in added or not added[number].special or token in template
    ]
    if used:
        raise ConfigError(
            f"{key}: the tokenizer of {name} has {len(tokenizer)} tokens, but the model has embeddings for {rows} "
            f"(vocab_size in its config.json); {used[0]!r} has none. Take the tokenizer that belongs to the model, or "
            "give it more with model.resize_token_embeddings(), and save both."
        )
    try:
        generation = GenerationConfig.from_pretrained(name, **options).to_dict()
    except OSError:  # most models have one, none needs it
        generation = {}
    written, _ = PretrainedConfig.get_config_dict(name, **options)  # without the defaults of its class
    written |= written.get("text_config") or {}
    for file, found in (("config.json", written), ("generation_config.json", generation)):
        for field in ("eos_token_id", "pad_token_id"):
            named = found.get(field)
            for number in named if isinstance(named, list) else [named]:
                if number is not None and number >= 0 and number not in added and number not in needed:
                    raise ConfigError(
                        f"{key}: {field} is {number} in the {file} of {name}, which its tokenizer has as "
                        f"{_spelling(tokenizer, number)}, and no marker; the tokenizer's own is "
                        f"{getattr(tokenizer, field)}. One of them belongs to another model: write the right "
                        f"{field} into {file}."
                    )


def _spelling(tokenizer: "PreTrainedTokenizerBase", number: int) -> str:
    return repr(tokenizer.convert_ids_to_tokens(number)) if number < len(tokenizer) else "no token"


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
