"""Schema of `train_preferences.py`: which model is trained, on which pairs of texts, and with which loss."""

from dataclasses import field
from typing import Annotated, Literal, get_args

from classroom_rl.config.base import HuggingFaceConfig, LoggingConfig
from classroom_rl.config.checks import check_duration, check_hub, check_logging
from classroom_rl.config.fields import FilePath, Flag, LearningRate, Number, Positive, Seed, between, config_group
from classroom_rl.config.model_checks import check_lora
from classroom_rl.config.train_sft import FineTuningConfig, TrainSFTModelConfig
from classroom_rl.errors import ConfigError

KTO = "kto"
PreferenceLoss = Literal["dpo", "kto"]
PairSource = Literal["group", "draft", "desk", "judge"]
PAIR_SOURCES: tuple[str, ...] = get_args(PairSource)


@config_group
class TrainPreferencesTrainConfig(FineTuningConfig):
    """Beside the options of every fine-tuning, those of one on pairs. Dropout is off, also that of `model.lora`: the
    loss compares the model with the one that it starts from."""

    loss: PreferenceLoss = "dpo"
    """DPO (Rafailov et al. 2023) compares the two texts of a pair; KTO (Ethayarajh et al. 2024) takes each alone, as a
    good or a bad one."""
    beta: Positive = 0.1
    """How strongly the model is held to the one that it starts from: the larger, the closer it stays."""
    learning_rate: LearningRate = 1e-6
    """Of the optimizer; `lr_scheduler_type` says how it changes over the steps."""


@config_group
class PairsConfig:
    """The pairs, which `python -m classroom_rl.results.pairs RUN` makes of a training."""

    pairs: FilePath | None = None
    """The file of pairs, or the run folder with `pairs.parquet` in it."""
    sources: list[PairSource] = field(default_factory=lambda: list(PAIR_SOURCES))
    """The pairs to take: best and worst conversation of a group; a rejected draft and what took its place; what a
    person decided at the desk; best and worst message of a group by the judge's scores."""
    held_out_share: Annotated[Number, between(0, 0.9)] = 0.1
    """The share of the problems whose pairs are not trained on, but measured before and after; 0: nothing is
    measured."""
    shuffle_pairs: Flag = False
    """A control that must teach nothing: swaps the better and the worse text in one of every two pairs to train on that
    are alike, of one source and with like differences of length."""
    shuffle_seed: Seed = 0
    """Of `shuffle_pairs`: which one of the two. Compare several; the held-out problems, which `seed` draws, stay the
    same."""


@config_group
class TrainPreferencesConfig:
    """The configuration of `train_preferences.py`. The model is saved in `<logging.save_dir>/model`, the figures on the
    held-out pairs in `preferences.json`; an interrupted run resumes from its last checkpoint."""

    train: TrainPreferencesTrainConfig = field(default_factory=TrainPreferencesTrainConfig)
    model: TrainSFTModelConfig = field(default_factory=TrainSFTModelConfig)
    dataset: PairsConfig = field(default_factory=PairsConfig)
    huggingface: HuggingFaceConfig = field(default_factory=HuggingFaceConfig)
    logging: LoggingConfig = field(
        default_factory=lambda: LoggingConfig(save_dir="output", wandb_project="train_preferences")
    )
    seed: Seed = 42
    """Of everything that is drawn, such as the problems that are held out."""
    dry_run: Flag = False
    """Trains nothing: prints the configuration, checks it, and ends (docs/configure.md)."""


def check_train_preferences(config: TrainPreferencesConfig) -> None:
    """Check the configuration of a training on pairs. Raises a `ConfigError` naming the key, the rule and the fix."""
    check_lora("model.lora", config.model.lora)
    check_logging(config.logging)
    check_hub(config.huggingface)
    check_duration(config.train.epochs, config.train.max_steps)
    if config.train.loss == KTO and config.train.per_device_train_batch_size < 2:
        raise ConfigError(
            "train.per_device_train_batch_size is 1; with train.loss=kto it must be at least 2, because KTO compares "
            "each text with another one of its micro-batch."
        )
    if not config.dataset.pairs:
        raise ConfigError(
            "dataset.pairs names no file and no run folder; make one with `python -m classroom_rl.results.pairs RUN` "
            "and set dataset.pairs=RUN."
        )
    if not config.dataset.sources:
        raise ConfigError(f"dataset.sources is empty; name at least one of {', '.join(PAIR_SOURCES)}.")
    if config.dataset.shuffle_seed != PairsConfig().shuffle_seed and not config.dataset.shuffle_pairs:
        raise ConfigError(
            f"dataset.shuffle_seed is {config.dataset.shuffle_seed}, but dataset.shuffle_pairs is false and nothing is "
            "swapped: set dataset.shuffle_pairs=true, or leave shuffle_seed out."
        )
