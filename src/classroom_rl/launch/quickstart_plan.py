"""The commands of the quickstart's programs, and of `make small-tutor`'s, with their arguments, built before anything
is started."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.compose import quoted as in_quotes
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import command_line, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig, check_train_sft
from classroom_rl.memory.sources import gpu_is_there
from classroom_rl.server.client import server_url

QUICKSTART = "quickstart"
SFT_PREFIX = "sft."


@dataclass(frozen=True)
class ModelCommands:
    """The commands that make what a training starts from: the world and the models of a run folder.

    Attributes:
        config_name: the configuration of the fine-tuning.
        world: the program that makes problems, corpus, tokenizer and untrained model.
        titles: what the two stages are called on the terminal.
    """

    folder: Path
    seed: int
    sft_overrides: tuple[str, ...] = ()
    config_name: str = "quickstart"
    world: str = "classroom_rl.environments.toy_language.build"
    titles: tuple[str, str] = (
        "the language, its lessons and its corpus",
        "a tiny model learns the language (train_sft.py)",
    )

    @property
    def model(self) -> Path:
        """The folder of the fine-tuned model; it exists only if the model is complete."""
        return self.folder / "sft" / "model"

    @property
    def recipe(self) -> dict:
        """The settings that the models depend on."""
        return {"seed": self.seed, "sft_overrides": list(self.sft_overrides)}

    def world_command(self) -> list[str]:
        """The command that makes problems, corpus, tokenizer and untrained model."""
        program = [sys.executable, "-m", self.world]
        return [*program, "--out", str(self.folder / "world"), "--seed", str(self.seed)]

    def sft_arguments(self) -> list[str]:
        """The arguments of train_sft.py."""
        place = f"logging.save_dir={quoted(self.folder / 'sft')}"
        return ["--config-name", self.config_name, place, f"seed={self.seed}", *self.sft_overrides]

    def sft_command(self) -> list[str]:
        """The command that makes the model that teacher and student start from."""
        return [sys.executable, "-m", "classroom_rl.launch.sft", *self.sft_arguments()]

    def sft_environment(self) -> dict[str, str]:
        """Variables that make train_sft.py see one GPU only: it is a single process, and would copy its model to all
        GPUs."""
        if not gpu_is_there():
            return {}
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


@dataclass(frozen=True)
class QuickstartCommands:
    """The commands of a whole way from a model to its report: evaluated, trained, evaluated again.

    Attributes:
        name: of the configurations, in config/train_rl and in config/eval.
        overrides: as given, without those of the fine-tuning.
        config: the configuration of server and trainer.
        rl_arguments: the arguments of server and trainer.
        models: the commands that make the models; None for models that exist.
    """

    name: str
    overrides: tuple[str, ...]
    config: TrainRLConfig
    rl_arguments: tuple[str, ...]
    models: ModelCommands | None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.logging.save_dir)

    @property
    def recipe(self) -> dict:
        """What the models depend on that the training starts from."""
        return {"model": self.config.teacher_model.model_name_or_path} if self.models is None else self.models.recipe

    @property
    def files(self) -> list[Path | None]:
        """The YAML files of server and trainer, of the fine-tuning if there is one, and of the evaluation."""
        folders = ("train_rl", "eval") if self.models is None else ("train_rl", "train_sft", "eval")
        return [command_line(folder, ["--config-name", self.name]).file for folder in folders]

    def eval_arguments(self, when: str) -> list[str]:
        """The arguments of eval.py; `when` is "before" or "after" the training. Models that were made come with
        held-out lessons; otherwise the evaluation's configuration names them."""
        lessons = quoted(self.folder / "world" / "lessons_heldout.jsonl")
        return [
            *("--config-name", self.name),
            f"server_url={server_url(self.config.generation)}",
            *([] if self.models is None else [f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]"]),
            *(
                each
                for each in self.overrides
                if applies(each, EvalConfig) and overridden_key(each) != "logging.save_dir"
            ),
            f"logging.save_dir={quoted(self.folder / 'eval' / when)}",
        ]

    def eval_command(self, when: str) -> list[str]:
        """The command that evaluates the tutor that the server holds."""
        return [sys.executable, "-m", "classroom_rl.launch.evaluate", *self.eval_arguments(when)]


def make_commands(overrides: Sequence[str]) -> QuickstartCommands:
    """Build the quickstart's commands, and check all configurations.

    An override goes to server and trainer, and to the evaluation if that has such a key. An override that begins with
    `sft.` goes to the fine-tuning. Of the other overrides, the fine-tuning only gets the seed: a user who gives
    `train.learning_rate=0` expects it to apply to the RL training alone.

    Raises:
        ConfigError: if one of the programs would refuse its configuration.
    """
    sft = tuple(each.removeprefix(SFT_PREFIX) for each in overrides if each.startswith(SFT_PREFIX))
    others = tuple(each for each in overrides if not each.startswith(SFT_PREFIX))
    config, rl_arguments = _training_of(QUICKSTART, others)
    models = ModelCommands(Path(config.logging.save_dir), config.seed, sft)
    load(TrainSFTConfig, "train_sft", models.sft_arguments(), check_train_sft)
    return _checked(QuickstartCommands(QUICKSTART, others, config, rl_arguments, models))


def commands_without_models(name: str, overrides: Sequence[str]) -> QuickstartCommands:
    """Build the commands for models that exist, and check all configurations.

    Args:
        name: of the configurations, in config/train_rl and in config/eval.

    Raises:
        ConfigError: if one of the programs would refuse its configuration.
    """
    config, rl_arguments = _training_of(name, overrides)
    return _checked(QuickstartCommands(name, tuple(overrides), config, rl_arguments, None))


def _training_of(name: str, overrides: Sequence[str]) -> tuple[TrainRLConfig, tuple[str, ...]]:
    """The configuration of server and trainer, and their arguments."""
    own = (each for each in overrides if applies(each, TrainRLConfig) or not applies(each, EvalConfig))
    arguments = ("--config-name", name, *own)
    return load(TrainRLConfig, "train_rl", arguments, check_train_rl), arguments


def _checked(commands: QuickstartCommands) -> QuickstartCommands:
    load(EvalConfig, "eval", commands.eval_arguments("before"), check_eval)
    return commands


def applies(override: str, schema: type) -> bool:
    """Whether a schema has the key that an override sets, or a mapping that contains the key."""
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
    """A path as the value of an override, in quotes if Hydra needs them."""
    return str(path) if re.fullmatch(r"[\w./-]+", str(path), re.ASCII) else in_quotes(str(path))
