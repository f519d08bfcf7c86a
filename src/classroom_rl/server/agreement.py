"""Checks that a server and its trainer have the same configuration, as far as conversations depend on it."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from classroom_rl.config.models import ModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.system.shipped import as_written

_ROLES = ("teacher_model", "student_model", "judge_model", "reward_model", "supervisor_model")
_RUNTIME_KEYS = frozenset(
    "max_num_seqs gpu_memory_utilization number_of_gpus_per_instance data_parallel_size gpus enforce_eager "
    "cpu_kvcache_gib cpu_cores api_key_env max_concurrent_requests requests_per_minute tokens_per_minute "
    "request_timeout_s deadline_s "
    "usd_per_million_prompt_tokens usd_per_million_completion_tokens max_cost_usd max_failed_share dropout".split()
)
"""Model keys that affect where, how fast and at what cost a model answers or is trained, but not what it says."""
_MAX_LISTED = 12
_CONTENT_PREFIX = "the content of "
_CONTENT_KEY = re.compile(r"prompt|rubric$|word_list$")
_PATH_KEY = re.compile(r"path|template|rubric$|word_list$")


def conversation_keys(config: TrainRLConfig) -> dict[str, str]:
    """Return the configuration values that a conversation and its verdict depend on: dotted key → value as JSON text.

    A server reads each prompt template once, so the result also has a fingerprint of the content of each template file
    that exists here. The weights of the rewards are left out, because a server sends them with every response.
    """
    generation = config.generation.identity()
    if config.supervisor_model is not None and hasattr(config.generation, "supervisor"):
        generation["supervisor"] = asdict(config.generation.supervisor)
    values: dict[str, Any] = {"environment": config.environment, "seed": config.seed, "generation": generation}
    values |= {role: _without_runtime_keys(getattr(config, role)) for role in _ROLES}
    values["train"] = {"turn_credit": {"rewards": sorted(config.train.turn_credit.weights)}}
    run_folder, flat = os.path.abspath(config.logging.save_dir), dict(_flatten(values))
    for key, value in flat.items():
        if isinstance(value, str) and value and _PATH_KEY.search(key):
            flat[key] = _portable_path(as_written(value), run_folder)
    keys = {key: json.dumps(value, ensure_ascii=False) for key, value in flat.items()}
    paths = {key: value for key, value in _flatten(values) if _CONTENT_KEY.search(key) and isinstance(value, str)}
    return keys | {f"{_CONTENT_PREFIX}{key}": digest for key, path in paths.items() if (digest := _fingerprint(path))}


def digest_of(keys: Mapping[str, str]) -> str:
    """Return a short fingerprint of `conversation_keys`."""
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]


def refuse_other_play(server_keys: Mapping[str, str], trainer_keys: Mapping[str, str], url: str) -> None:
    """Compare the `conversation_keys` of a server with those of its trainer. The content of a template is compared only
    if both have the file. Raises a `ConfigError` with each key that differs, and both values."""
    differences = []
    for key in dict.fromkeys((*trainer_keys, *server_keys)):
        if server_keys.get(key) == trainer_keys.get(key) or _belongs_to_absent_model(key, server_keys, trainer_keys):
            continue
        if not key.startswith(_CONTENT_PREFIX):
            server_value, trainer_value = _shown_value(key, server_keys), _shown_value(key, trainer_keys)
            differences.append(f"{key} is {server_value} there and {trainer_value} here")
        elif key in server_keys and key in trainer_keys:
            path = trainer_keys[key.removeprefix(_CONTENT_PREFIX)]
            differences.append(f"{path} has changed since the server read it")
    if differences:
        more = f"; and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        raise ConfigError(
            f"The server at {url} would hold other conversations than this trainer is configured for: "
            f"{'; '.join(differences[:_MAX_LISTED])}{more}. Start the server again with the trainer's configuration "
            "and overrides, or give the trainer the server's."
        )


def refuse_other_weights(theirs: Mapping[str, float], ours: Mapping[str, float]) -> None:
    """Raise a `ConfigError` if a server sums up rewards by other weights than its trainer's."""
    if theirs != ours:
        raise ConfigError(
            f"The server sums up rewards by {theirs}, but this trainer is configured for {ours}. Start both with the "
            "same train.reward_weights and judge rules."
        )


def _belongs_to_absent_model(key: str, server_keys: Mapping[str, str], trainer_keys: Mapping[str, str]) -> bool:
    """Whether a key belongs to a model that one side does not have. The role itself is a difference then."""
    # A missing model has the role itself as its key; a configured one only has keys below the role.
    absent_roles = [role for role in _ROLES if role in server_keys or role in trainer_keys]
    return any(key.startswith((f"{role}.", f"generation.{role.removesuffix('_model')}.")) for role in absent_roles)


def _shown_value(key: str, keys: Mapping[str, str]) -> str:
    name = keys.get(f"{key}.model_name_or_path") if key in _ROLES else None
    return keys.get(key, name or "not set")


def _without_runtime_keys(model: ModelConfig | None) -> dict[str, Any] | None:
    """Return the keys of a role's model without `_RUNTIME_KEYS`; None without a model."""

    def select(group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: select(value) if isinstance(value, dict) else value
            for name, value in group.items()
            if name not in _RUNTIME_KEYS
        }

    return None if model is None else select(asdict(model))


def _flatten(group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf in nested mappings. An empty mapping is a leaf."""
    for name, value in group.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _portable_path(name: str, run_folder: str) -> str:
    """Return a path relative to the run folder or to the working directory. Server and trainer may write the same path
    in different ways and have this project in different folders. The name of a model on the Hub stays as it is."""
    absolute = os.path.abspath(name)
    for folder, prefix in ((run_folder, "…/"), (os.getcwd(), "")):
        if absolute.startswith(f"{folder}/"):
            return prefix + absolute.removeprefix(f"{folder}/")
    return os.path.normpath(name)


def _fingerprint(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if Path(path).is_file() else None
    except OSError:  # the code that reads the template reports why it cannot be read
        return None
