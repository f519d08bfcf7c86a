"""What the quickstart runs with which arguments, worked out before anything is started."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from config.checks import check_train_rl
from config.eval_model import EvalConfig, check_eval
from config.load import command_line, load
from config.train_rl_model import TrainRLConfig
from config.train_sft_model import TrainSFTConfig, check_train_sft
from src.memory.sources import gpu_is_there
from src.server.client import server_url

NAME = ["--config-name", "quickstart"]
SFT_PREFIX = "sft."


@dataclass(frozen=True)
class ModelCommands:
    """The world and the models of a run folder: everything that a training starts from."""

    folder: Path
    seed: int
    sft_overrides: tuple[str, ...] = ()

    @property
    def model(self) -> Path:
        """Where the fine-tuned model ends up; whole or not there."""
        return self.folder / "sft" / "model"

    @property
    def recipe(self) -> dict:
        """What decides how the models come out."""
        return {"seed": self.seed, "sft_overrides": list(self.sft_overrides)}

    def world_command(self) -> list[str]:
        """Makes lessons, corpus, tokenizer and untrained model."""
        program = [sys.executable, "-m", "src.toy_language.build"]
        return [*program, "--out", str(self.folder / "world"), "--seed", str(self.seed)]

    def sft_arguments(self) -> list[str]:
        """Of train_sft.py."""
        place = f"logging.save_dir={quoted(self.folder / 'sft')}"
        return [*NAME, place, f"seed={self.seed}", *self.sft_overrides]

    def sft_command(self) -> list[str]:
        """Makes the model that teacher and student start from."""
        return [sys.executable, "train_sft.py", *self.sft_arguments()]

    def sft_environment(self) -> dict[str, str]:
        """Shows it one GPU where there are several: it is one process, which would copy its model onto all of them."""
        if not gpu_is_there():
            return {}
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


@dataclass(frozen=True)
class QuickstartCommands:
    """A whole quickstart.

    Attributes:
        overrides: as given.
        config: of server and trainer.
        rl_arguments: of server and trainer.
    """

    overrides: tuple[str, ...]
    config: TrainRLConfig
    rl_arguments: tuple[str, ...]
    models: ModelCommands

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.models.folder

    @property
    def files(self) -> list[Path | None]:
        """The YAMLs that its programs take: of server and trainer, of the fine-tuning, of the evaluation."""
        return [command_line(folder, NAME).file for folder in ("train_rl", "train_sft", "eval")]

    def eval_arguments(self, when: str) -> list[str]:
        """Of eval.py, `before` or `after` the training."""
        lessons = quoted(self.folder / "world" / "lessons_heldout.jsonl")
        return [
            *NAME,
            f"server_url={server_url(self.config.generation)}",
            f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]",
            *(
                each
                for each in self.overrides
                if applies(each, EvalConfig) and overridden_key(each) != "logging.save_dir"
            ),
            f"logging.save_dir={quoted(self.folder / 'eval' / when)}",
        ]

    def eval_command(self, when: str) -> list[str]:
        """Measures the tutor that the server holds."""
        return [sys.executable, "eval.py", *self.eval_arguments(when)]


def make_commands(overrides: Sequence[str]) -> QuickstartCommands:
    """The programs' arguments. An override reaches server and trainer, and the evaluation if it has such a key; one
    that begins with `sft.` reaches the fine-tuning, which otherwise takes the seed alone: that
    `train.learning_rate=0` means the training is to be expected, that it means the fine-tuning is not.

    Raises:
        ConfigError: if one of the programs would refuse its configuration.
    """
    sft = tuple(each.removeprefix(SFT_PREFIX) for each in overrides if each.startswith(SFT_PREFIX))
    others = tuple(each for each in overrides if not each.startswith(SFT_PREFIX))
    rl_arguments = (*NAME, *(each for each in others if applies(each, TrainRLConfig) or not applies(each, EvalConfig)))
    config = load(TrainRLConfig, "train_rl", rl_arguments, check_train_rl)
    models = ModelCommands(Path(config.logging.save_dir), config.seed, sft)
    quickstart = QuickstartCommands(others, config, rl_arguments, models)
    load(TrainSFTConfig, "train_sft", models.sft_arguments(), check_train_sft)
    load(EvalConfig, "eval", quickstart.eval_arguments("before"), check_eval)
    return quickstart


def applies(override: str, schema: type) -> bool:
    """Whether a schema has the key that an override sets, or has a mapping which that key is in."""
    key = overridden_key(override)
    return any(key == leaf or key.startswith(f"{leaf}.") for leaf in _leaves(schema))


def overridden_key(override: str) -> str:
    """The key that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def _leaves(schema: type, prefix: str = "") -> list[str]:
    found = []
    for item in fields(schema):
        inner = is_dataclass(item.type)
        found += _leaves(item.type, f"{prefix}{item.name}.") if inner else [prefix + item.name]
    return found


def quoted(path: Path) -> str:
    """A path as a value of an override, in quotes where Hydra needs them."""
    if re.fullmatch(r"[\w./-]+", str(path)):
        return str(path)
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
