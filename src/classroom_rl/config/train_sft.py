"""Schema of `train_sft.py`: which model is fine-tuned, on which conversations, and how."""

from dataclasses import field
from typing import Annotated, Literal

from classroom_rl.config.base import DataSource, HuggingFaceConfig, LoggingConfig, LoraConfig
from classroom_rl.config.checks import check_duration, check_hub, check_logging
from classroom_rl.config.fields import (
    ContextLength,
    Count,
    Examples,
    Flag,
    LearningRate,
    MaxSteps,
    ModelPath,
    Number,
    Seed,
    Text,
    Whole,
    at_least,
    config_group,
)
from classroom_rl.config.model_checks import check_lora
from classroom_rl.config.values import Optimizer, Scheduler
from classroom_rl.errors import ConfigError

MUON = "muon"
SFTOptimizer = Literal["muon", Optimizer]
SFTDtype = Literal["float32", "bfloat16"]


@config_group
class TrainSFTTrainConfig:
    """Options of the optimization. A step takes `per_device_train_batch_size` × `gradient_accumulation_steps` ×
    processes conversations; `max_steps` above 0 overrides `epochs`.

    `warmup` is a share of the steps if it is below 1, otherwise a number of steps. `optimizer` takes transformers'
    names, and `muon`: Muon for the matrices of the layers, AdamW for embeddings, output layer and vectors. `dtype` is
    that of the arithmetic and of the saved model; the trained weights are float32. Without `assistant_only_loss`,
    conversations are learned whole, whatever the weights of their messages; of corrections only the target is ever
    learned.
    """

    gradient_accumulation_steps: Count = 1
    gradient_checkpointing: Flag = True
    per_device_train_batch_size: Count = 1
    learning_rate: LearningRate = 1e-5
    lr_scheduler_type: Scheduler = "cosine"
    warmup: Annotated[Number, at_least(0, 10**9)] = 0.0
    optimizer: SFTOptimizer = "adamw_torch"
    epochs: Annotated[Whole, at_least(0, 10**6)] = 1
    max_steps: MaxSteps = -1
    dtype: SFTDtype = "bfloat16"
    assistant_only_loss: Flag = True


@config_group
class TrainSFTModelConfig:
    """The model to start from: a Hub name or a local folder.

    `tokenizer_name_or_path` null takes the model's own. `max_length` is in tokens; longer conversations are cut at
    their end, longer corrections are left out. With `lora.enable` an adapter is trained instead of the model's weights.
    It is saved in `<logging.save_dir>/adapter`, and the model with the adapter merged in where the model is saved
    otherwise.
    """

    model_name_or_path: ModelPath = "Qwen/Qwen2.5-7B-Instruct"
    tokenizer_name_or_path: ModelPath | None = None
    max_length: ContextLength = 16384
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(rank=256, alpha=512))


@config_group
class ConversationSource(DataSource):
    """A dataset of conversations: a column of lists of {role, content}. `conversation_column` null takes `conversation`
    or `messages`, whichever exists. A local file of corrections (`corrections.parquet` of a training's run folder) has
    no such column: it is trained on as the tokens that it holds."""

    conversation_column: Text | None = None


@config_group
class TrainSFTDatasetConfig:
    """The conversations to train on, and those to evaluate on after each epoch; either may be corrections, if both
    are. −1 takes all."""

    train_datasets: list[ConversationSource] = field(default_factory=list)
    val_datasets: list[ConversationSource] = field(default_factory=list)
    max_train_examples: Examples = -1
    max_val_examples: Examples = -1


@config_group
class TrainSFTConfig:
    """The configuration of `train_sft.py`. The model is saved in `<logging.save_dir>/model`; every `logging.save_steps`
    steps (0: never) a checkpoint is saved from which an interrupted run resumes."""

    train: TrainSFTTrainConfig = field(default_factory=TrainSFTTrainConfig)
    model: TrainSFTModelConfig = field(default_factory=TrainSFTModelConfig)
    dataset: TrainSFTDatasetConfig = field(default_factory=TrainSFTDatasetConfig)
    huggingface: HuggingFaceConfig = field(default_factory=HuggingFaceConfig)
    logging: LoggingConfig = field(default_factory=lambda: LoggingConfig(save_dir="output", wandb_project="train_sft"))
    seed: Seed = 42
    dry_run: Flag = False


def check_train_sft(config: TrainSFTConfig) -> None:
    """Check the configuration of a fine-tuning.

    Raises:
        ConfigError: naming the key, the rule and the fix.
    """
    train = config.train
    check_lora("model.lora", config.model.lora)
    if config.model.lora.enable and train.optimizer == MUON:
        raise ConfigError(
            "train.optimizer is muon, which is for a model's own weights; with model.lora.enable=true take another, "
            "such as adamw_torch."
        )
    check_logging(config.logging)
    check_hub(config.huggingface)
    check_duration(train.epochs, train.max_steps)
    if not config.dataset.train_datasets:
        raise ConfigError(
            "dataset.train_datasets is empty; name at least one, for example [{name_or_path: conversations.jsonl}]."
        )
