"""Configurations in tests."""

from pathlib import Path
from typing import Any

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import load
from classroom_rl.config.train_preferences import TrainPreferencesConfig, check_train_preferences
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig, check_train_sft

SCHEMAS = {
    "train_rl": (TrainRLConfig, check_train_rl),
    "train_sft": (TrainSFTConfig, check_train_sft),
    "train_preferences": (TrainPreferencesConfig, check_train_preferences),
    "eval": (EvalConfig, check_eval),
}
PROGRAMS = ("vllm_server.py", "train_rl.py", "train_sft.py", "train_preferences.py", "eval.py")
BASE = "defaults: [quickstart, _self_]\n"
"""The beginning of a YAML that changes something of the quickstart's."""


def loaded(folder: str, *arguments: str) -> Any:
    """The configuration that the program whose YAMLs are in config/`folder` gets from these arguments."""
    schema, check = SCHEMAS[folder]
    return load(schema, folder, arguments, check)


def training(*arguments: str) -> TrainRLConfig:
    """The training that these arguments configure, from the quickstart's file unless they name another."""
    return loaded("train_rl", *arguments)


def own_file(folder: Path, text: str | bytes, name: str = "own") -> list[str]:
    """Write a YAML of the user's own, and return the arguments that name it."""
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    (folder / f"{name}.yaml").write_bytes(data)
    return ["--config-dir", str(folder), "--config-name", name]


def loaded_text(folder: Path, text: str, *overrides: str) -> TrainRLConfig:
    """The training that a YAML of the user's own configures."""
    return loaded("train_rl", *own_file(folder, text), *overrides)
