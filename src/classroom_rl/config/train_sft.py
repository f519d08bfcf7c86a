"""Schema of `train_sft.py`: which model is fine-tuned, on which conversations, and how."""

from dataclasses import field
from typing import Annotated, Literal

from classroom_rl.config.base import DataSource, HuggingFaceConfig, LoggingConfig
from classroom_rl.config.checks import check_duration, check_hub, check_logging
from classroom_rl.config.fields import (
    ContextLength,
    Count,
    CountFromZero,
    Examples,
    FilePath,
    Flag,
    LearningRate,
    MaxSteps,
    ModelPath,
    Number,
    Seed,
    Share,
    Text,
    at_least,
    config_group,
)
from classroom_rl.config.model_checks import check_lora
from classroom_rl.config.models import LoraConfig
from classroom_rl.config.values import Optimizer, Scheduler
from classroom_rl.errors import ConfigError

MUON = "muon"
SFTOptimizer = Literal["muon", Optimizer]
SFTDtype = Literal["float32", "bfloat16"]


@config_group
class FineTuningConfig:
    """Options of the optimization. A step takes `per_device_train_batch_size` × `gradient_accumulation_steps` ×
    processes examples."""

    gradient_accumulation_steps: Count = 1
    """Micro-batches whose gradients add up to one step."""
    gradient_checkpointing: Flag = True
    """Computes activations again in the backward pass: less memory, more time."""
    per_device_train_batch_size: Count = 1
    """Examples of a micro-batch, in each process: conversations or corrections; pairs; for `kto` single texts, two of
    each pair."""
    learning_rate: LearningRate = 1e-5
    """Of the optimizer; `lr_scheduler_type` says how it changes over the steps."""
    lr_scheduler_type: Scheduler = "cosine"
    """The schedule of the learning rate, by transformers' name."""
    warmup: Annotated[Number, at_least(0, 10**9)] = 0.0
    """The learning rate first rises from 0: over a share of the steps if this is below 1, otherwise over a number of
    steps. The schedule `constant` has no warm-up."""
    optimizer: Optimizer = "adamw_torch"
    """By transformers' name."""
    epochs: CountFromZero = 1
    """Passes over the examples."""
    max_steps: MaxSteps = -1
    """Optimizer steps. Above 0, it overrides `epochs`."""
    dtype: SFTDtype = "bfloat16"
    """Of the arithmetic and of the saved model; the trained weights are float32."""


@config_group
class TrainSFTTrainConfig(FineTuningConfig):
    """Beside the options of every fine-tuning, those of one on conversations or corrections."""

    optimizer: SFTOptimizer = "adamw_torch"
    """By transformers' name, or `muon`: Muon for the matrices of the layers, AdamW for embeddings, output layer and
    vectors. `muon` is not for adapters."""
    assistant_only_loss: Flag = True
    """Whether only the assistant's messages are learned. False: conversations are learned whole, whatever the weights
    of their messages. Of corrections only the target is ever learned, of dialogues only what the student says."""


@config_group
class TrainSFTModelConfig:
    """The model to start from. With `lora.enable` an adapter is trained instead of the model's weights. It is saved in
    `<logging.save_dir>/adapter`, and the model with the adapter merged in where the model is saved otherwise."""

    model_name_or_path: ModelPath = "Qwen/Qwen2.5-7B-Instruct"
    """A Hub name or a local folder."""
    tokenizer_name_or_path: ModelPath | None = None
    """Another tokenizer; null: the model's own."""
    max_length: ContextLength = 16384
    """In tokens. Longer conversations are cut at their end; longer corrections and pairs are left out."""
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(rank=256, alpha=512))


@config_group
class ConversationSource(DataSource):
    """A dataset of conversations. A local file of corrections (`corrections.parquet` of a training's run folder) has no
    column of them: it is trained on as the tokens that it holds."""

    conversation_column: Text | None = None
    """The column of lists of {role, content}; null: `conversation` or `messages`, whichever exists."""


@config_group
class StudentDataConfig:
    """Fine-tuning of a student. With prompts of its personas, `dataset` names recorded dialogues: run folders, their
    Parquet files, or rows of others such as MathDial's (docs/evaluation.md). Each message of the student is learned
    after the prompt that a classroom with the same keys in `generation` gives the student's model at that place."""

    student_personas_prompts_paths: dict[str, FilePath] = field(default_factory=dict)
    """The prompts of its personas, as in `generation`. A single one is for all messages; with several, the dialogues
    must say which persona each message has, as those of a run do. Empty: no student is fine-tuned."""
    student_initial_attempt_prompt_path: FilePath | None = None
    """As in `generation`, for a classroom in which the student's attempt opens the dialogue: the attempt of a run's
    student, or a row's `student_incorrect_solution`, is learned, too. Null: dialogues begin with the tutor."""
    quote_teacher: Flag = False
    """As in `generation`."""
    held_out_share: Share = 0.0
    """The share of the problems that are drawn from the training's with `seed` and not learned. The loss on the
    dialogues about them is measured before the training and after each epoch, and `<logging.save_dir>/held_out.jsonl`
    holds them, as problems and as a reference for an evaluation of students."""


@config_group
class TrainSFTDatasetConfig:
    """Both lists name conversations, or both corrections; with `student`, both dialogues."""

    train_datasets: list[ConversationSource] = field(default_factory=list)
    """What to train on."""
    val_datasets: list[ConversationSource] = field(default_factory=list)
    """What to evaluate on after each epoch; empty: there is no evaluation."""
    max_train_examples: Examples = -1
    """The most examples to train on, of all datasets together."""
    max_val_examples: Examples = -1
    """The same for those to evaluate on."""


@config_group
class TrainSFTConfig:
    """The configuration of `train_sft.py`. The model is saved in `<logging.save_dir>/model`; an interrupted run resumes
    from its last checkpoint."""

    train: TrainSFTTrainConfig = field(default_factory=TrainSFTTrainConfig)
    model: TrainSFTModelConfig = field(default_factory=TrainSFTModelConfig)
    dataset: TrainSFTDatasetConfig = field(default_factory=TrainSFTDatasetConfig)
    student: StudentDataConfig = field(default_factory=StudentDataConfig)
    huggingface: HuggingFaceConfig = field(default_factory=HuggingFaceConfig)
    logging: LoggingConfig = field(default_factory=lambda: LoggingConfig(save_dir="output", wandb_project="train_sft"))
    seed: Seed = 42
    """Of everything that is drawn, such as the order of the conversations."""
    dry_run: Flag = False
    """Trains nothing: prints the configuration and what it leads to, checks it, and ends (docs/configure.md)."""


def check_train_sft(config: TrainSFTConfig) -> None:
    """Check the configuration of a fine-tuning. Raises a `ConfigError` naming the key, the rule and the fix."""
    train = config.train
    check_lora("model.lora", config.model.lora)
    _check_student(config)
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


def _check_student(config: TrainSFTConfig) -> None:
    student = config.student
    if not student.student_personas_prompts_paths:
        if student != StudentDataConfig():
            raise ConfigError(
                "student has keys, but student.student_personas_prompts_paths is empty, so no student is fine-tuned: "
                "name a prompt, such as {student: prompt_templates/personas/maths_student.txt}, or leave student out."
            )
        return
    if student.held_out_share and config.dataset.val_datasets:
        raise ConfigError(
            "student.held_out_share and dataset.val_datasets are both set: hold out a share of the problems, or name "
            "other dialogues to measure on."
        )
    if any(source.conversation_column for source in (*config.dataset.train_datasets, *config.dataset.val_datasets)):
        raise ConfigError(
            "conversation_column is set, but student makes datasets of dialogues, whose turns are found by their name: "
            "leave it out."
        )
