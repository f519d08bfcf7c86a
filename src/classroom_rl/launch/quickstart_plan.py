"""Builds the commands of the quickstart and of `make small-tutor`, with all arguments, before anything is started."""

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
    """The commands that create what a training starts from: the world and the models in a run folder.

    Attributes:
        config_name: the configuration of the fine-tuning.
        world: the program that creates problems, corpus, tokenizer and untrained model.
        titles: the names of the two stages on the terminal.
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
        """The folder of the fine-tuned model. It exists only if the model is complete."""
        return self.folder / "sft" / "model"

    @property
    def recipe(self) -> dict:
        """The settings on which the models depend."""
        return {"seed": self.seed, "sft_overrides": list(self.sft_overrides)}

    def world_command(self) -> list[str]:
        """The command that creates problems, corpus, tokenizer and untrained model."""
        program = [sys.executable, "-m", self.world]
        return [*program, "--out", str(self.folder / "world"), "--seed", str(self.seed)]

    def sft_arguments(self) -> list[str]:
        """The arguments of train_sft.py."""
        save_dir = f"logging.save_dir={quoted(self.folder / 'sft')}"
        return ["--config-name", self.config_name, save_dir, f"seed={self.seed}", *self.sft_overrides]

    def sft_command(self) -> list[str]:
        """The command that trains the model from which teacher and student start."""
        return [sys.executable, "-m", "classroom_rl.launch.sft", *self.sft_arguments()]

    def sft_environment(self) -> dict[str, str]:
        """Variables that make only one GPU visible to train_sft.py: it is a single process, and would otherwise copy
        its model to all GPUs (DataParallel)."""
        if not gpu_is_there():
            return {}
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


@dataclass(frozen=True)
class QuickstartCommands:
    """The commands from a model to its report: evaluation, training, evaluation.

    Attributes:
        name: the name of the configurations in config/train_rl and config/eval.
        overrides: the given overrides, without those of the fine-tuning.
        config: the configuration of server and trainer.
        rl_arguments: the arguments of server and trainer.
        models: the commands that create the models; None for existing models.
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
        """The settings on which the initial models depend."""
        return {"model": self.config.teacher_model.model_name_or_path} if self.models is None else self.models.recipe

    @property
    def files(self) -> list[Path | None]:
        """The YAML files of server and trainer, of the fine-tuning if there is one, and of the evaluation."""
        folders = ("train_rl", "eval") if self.models is None else ("train_rl", "train_sft", "eval")
        return [command_line(folder, ["--config-name", self.name]).file for folder in folders]

    def eval_arguments(self, when: str) -> list[str]:
        """The arguments of eval.py; `when` is "before" or "after" the training. The held-out lessons were created
        together with the models; for existing models, the evaluation's configuration names them."""
        lessons = quoted(self.folder / "world" / "lessons_heldout.jsonl")
        return [
            *("--config-name", self.name),
            f"server_url={server_url(self.config.generation)}",
            *([] if self.models is None else [f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]"]),
            *(
                override
                for override in self.overrides
                if applies(override, EvalConfig) and overridden_key(override) != "logging.save_dir"
            ),
            f"logging.save_dir={quoted(self.folder / 'eval' / when)}",
        ]

    def eval_command(self, when: str) -> list[str]:
        """The command that evaluates the server's current tutor."""
        return [sys.executable, "-m", "classroom_rl.launch.evaluate", *self.eval_arguments(when)]


def make_commands(overrides: Sequence[str]) -> QuickstartCommands:
    """Build the quickstart's commands, and check all configurations.

    An override goes to server and trainer, and to the evaluation if it has such a key. An override that begins with
    `sft.` goes to the fine-tuning. Of the other overrides, the fine-tuning gets only the seed: a user who gives
    `train.learning_rate=0` expects it to apply only to the RL training.

    Raises:
        ConfigError: if one of the programs would refuse its configuration.
    """
    sft = tuple(override.removeprefix(SFT_PREFIX) for override in overrides if override.startswith(SFT_PREFIX))
    rl_overrides = tuple(override for override in overrides if not override.startswith(SFT_PREFIX))
    config, rl_arguments = _load_training(QUICKSTART, rl_overrides)
    models = ModelCommands(Path(config.logging.save_dir), config.seed, sft)
    load(TrainSFTConfig, "train_sft", models.sft_arguments(), check_train_sft)
    return _check_evaluation(QuickstartCommands(QUICKSTART, rl_overrides, config, rl_arguments, models))


def commands_without_models(name: str, overrides: Sequence[str]) -> QuickstartCommands:
    """Build the commands for existing models, and check all configurations.

    Args:
        name: the name of the configurations in config/train_rl and config/eval.

    Raises:
        ConfigError: if one of the programs would refuse its configuration.
    """
    config, rl_arguments = _load_training(name, overrides)
    return _check_evaluation(QuickstartCommands(name, tuple(overrides), config, rl_arguments, None))


def _load_training(name: str, overrides: Sequence[str]) -> tuple[TrainRLConfig, tuple[str, ...]]:
    """Load the configuration of server and trainer. Returns it with their arguments."""
    # All but those that only the evaluation knows. Unknown keys stay, so that they are refused with a message.
    applicable = (
        override for override in overrides if applies(override, TrainRLConfig) or not applies(override, EvalConfig)
    )
    arguments = ("--config-name", name, *applicable)
    return load(TrainRLConfig, "train_rl", arguments, check_train_rl), arguments


def _check_evaluation(commands: QuickstartCommands) -> QuickstartCommands:
    load(EvalConfig, "eval", commands.eval_arguments("before"), check_eval)
    return commands


def applies(override: str, schema: type) -> bool:
    """Whether a configuration schema has the key that an override sets, or a mapping that contains the key."""
    key = overridden_key(override)
    return any(key == leaf or key.startswith(f"{leaf}.") for leaf in _leaves(schema))


def overridden_key(override: str) -> str:
    """The key that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def _leaves(schema: type, prefix: str = "") -> list[str]:
    keys = []
    for item in fields(schema):
        is_nested = is_dataclass(item.type)
        keys += _leaves(item.type, f"{prefix}{item.name}.") if is_nested else [prefix + item.name]
    return keys


def quoted(path: Path) -> str:
    """A path as an override's value, in quotes if Hydra needs them."""
    return str(path) if re.fullmatch(r"[\w./-]+", str(path), re.ASCII) else in_quotes(str(path))
