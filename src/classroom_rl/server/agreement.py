"""Whether a server plays and judges as its trainer is configured: the keys that a conversation depends on, compared."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from classroom_rl.config.base import ModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import turn_reward_weights
from classroom_rl.errors import ConfigError

_ROLES = ("teacher_model", "student_model", "judge_model", "reward_model", "supervisor_model")
_ONLY_HOW_IT_RUNS = frozenset(
    "max_num_seqs gpu_memory_utilization number_of_gpus_per_instance enforce_eager cpu_kvcache_gib cpu_cores "
    "api_key_env max_concurrent_requests requests_per_minute tokens_per_minute request_timeout_s deadline_s "
    "usd_per_million_prompt_tokens usd_per_million_completion_tokens max_cost_usd max_failed_share dropout".split()
)
"""Keys of a model that change where, how fast and for how much it answers or is trained, and not what it says."""
_MOST_NAMED = 12
_CONTENT = "the content of "
_NAMES_PATH = re.compile(r"path|template")


def conversation_keys(config: TrainRLConfig) -> dict[str, str]:
    """What a conversation and its verdict depend on, as text by dotted key. Of a prompt template, which a server reads
    once, also a fingerprint of its content, if the file is here. The weights of rewards are not among them; they come
    with every answer."""
    generation = config.generation.identity()
    if config.supervisor_model is not None and hasattr(config.generation, "supervisor"):
        generation["supervisor"] = asdict(config.generation.supervisor)
    whole: dict[str, Any] = {"environment": config.environment, "seed": config.seed, "generation": generation}
    whole |= {role: _answers_of(getattr(config, role)) for role in _ROLES}
    whole["train"] = {"turn_credit": {"rewards": sorted(turn_reward_weights(config))}}
    run_folder, spelled = os.path.abspath(config.logging.save_dir), dict(_flat(whole))
    for key, value in spelled.items():
        if isinstance(value, str) and value and _NAMES_PATH.search(key):
            spelled[key] = _place(value, run_folder)
    keys = {key: json.dumps(value, ensure_ascii=False) for key, value in spelled.items()}
    paths = {key: value for key, value in _flat(whole) if "prompt" in key and isinstance(value, str)}
    return keys | {f"{_CONTENT}{key}": found for key, path in paths.items() if (found := _fingerprint(path))}


def digest_of(keys: Mapping[str, str]) -> str:
    """A short fingerprint of `conversation_keys`."""
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]


def refuse_other_play(theirs: Mapping[str, str], ours: Mapping[str, str], url: str) -> None:
    """Compare a server's `conversation_keys` with its trainer's. Contents are compared where both have the file.

    Raises:
        ConfigError: with each key that differs, and both values.
    """
    differ = []
    for key in dict.fromkeys((*ours, *theirs)):
        if theirs.get(key) == ours.get(key) or _is_of_no_model(key, theirs, ours):
            continue
        if not key.startswith(_CONTENT):
            differ.append(f"{key} is {_value(key, theirs)} there and {_value(key, ours)} here")
        elif key in theirs and key in ours:
            differ.append(f"{ours[key.removeprefix(_CONTENT)]} has changed since the server read it")
    if differ:
        more = f"; and {len(differ) - _MOST_NAMED} more" if len(differ) > _MOST_NAMED else ""
        raise ConfigError(
            f"The server at {url} would hold other conversations than this trainer is configured for: "
            f"{'; '.join(differ[:_MOST_NAMED])}{more}. Start the server again with the trainer's configuration and "
            "overrides, or give the trainer the server's."
        )


def _is_of_no_model(key: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> bool:
    """Whether a key belongs to a model that one side does not have, which is difference enough."""
    absent = [role for role in _ROLES if role in theirs or role in ours]
    return any(key.startswith((f"{role}.", f"generation.{role.removesuffix('_model')}.")) for role in absent)


def _value(key: str, keys: Mapping[str, str]) -> str:
    name = keys.get(f"{key}.model_name_or_path") if key in _ROLES else None
    return keys.get(key, name or "not set")


def _answers_of(model: ModelConfig | None) -> dict[str, Any] | None:
    """The keys of a role's model without those of how it runs."""

    def kept(group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: kept(value) if isinstance(value, dict) else value
            for name, value in group.items()
            if name not in _ONLY_HOW_IT_RUNS
        }

    return None if model is None else kept(asdict(model))


def _flat(group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values by dotted key; an empty mapping is a value."""
    for name, value in group.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _place(name: str, run_folder: str) -> str:
    """A path as seen from the run folder or from here, because server and trainer may spell it in different ways and
    have this project in different folders. The name of a model on the Hub stays as it is."""
    whole = os.path.abspath(name)
    for folder, shown in ((run_folder, "…/"), (os.getcwd(), "")):
        if whole.startswith(f"{folder}/"):
            return shown + whole.removeprefix(f"{folder}/")
    return os.path.normpath(name)


def _fingerprint(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if Path(path).is_file() else None
    except OSError:  # whoever reads the template says why it cannot be read
        return None
