"""The length of a training run, and whether it can change the model: its conversations, its optimizer steps, and how
far these can move a weight.

The rule: Adam and similar optimizers move a weight by about the learning rate per step, so a run moves it by about
`learning rate × steps` at most, if all steps have the same sign. The engine's 16-bit format distinguishes a number from
one that differs by its rounding unit u (a share of 2⁻⁸ in bfloat16, 2⁻¹¹ in float16). A run that cannot move a weight
of typical size by the share u changes few of the served weights, and those by their last digit; a warning is logged.
For an adapter the movement of the weights that it is added to counts.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.models import LoraConfig
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.config.values import LARGEST_BATCH
from classroom_rl.errors import ClassroomError, ConfigError
from classroom_rl.judges.post_test.exams import check_exams
from classroom_rl.rollout.datasets import is_local_name, load_problems
from classroom_rl.rollout.problem import Problem

logger = logging.getLogger(__name__)

TYPICAL_WEIGHT = 0.02
"""The approximate size of the weights of Qwen, Llama and Gemma models: their `initializer_range`."""
TYPICAL_WIDTH = 4096
"""The approximate number of inputs of a layer with an adapter."""
ROUNDING_UNITS = {"auto": 2**-8, "bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}
"""The rounding unit by the dtype of the teacher's engine; `auto` is bfloat16 for nearly every model."""
_FALLING = ("linear", "cosine", "cosine_with_restarts", "polynomial")
_UNBOUNDED = ("sgd",)  # its steps are as large as the gradient


@dataclass(frozen=True)
class RunLength:
    """The numbers of sampled batches, of their conversations, and of optimizer steps in a whole run."""

    batches: int
    conversations: int
    steps: int


def run_length(train: TrainConfig, problems: int | None) -> RunLength | None:
    """The length of a run. A batch takes `number_of_problems_per_batch` problems, an incomplete batch at the end of an
    epoch is dropped, and each batch is trained on in `mu` steps; `max_steps` above 0 overrides `epochs`.

    Args:
        problems: the number of training problems; None if unknown.

    Returns:
        None if the length depends on an unknown number of problems.
    """
    if train.max_steps > 0:
        steps, batches = train.max_steps, math.ceil(train.max_steps / train.mu)
    elif problems is not None:
        batches = problems // train.number_of_problems_per_batch * train.epochs
        steps = batches * train.mu
    else:
        return None
    return RunLength(batches, batches * train.number_of_problems_per_batch * train.num_samples_per_problem, steps)


def farthest_move(train: TrainConfig, adapter: LoraConfig | None, steps: int) -> float | None:
    """About the farthest that `steps` optimizer steps can move a weight; None for an optimizer with unbounded steps.

    In an adapter B·A × alpha / rank, B starts at 0 and A's entries with variance 1 / (3 × inputs) (PEFT's
    initialization), so the weight that it is added to moves by learning rate × steps × alpha / √(3 × rank × inputs).
    """
    if train.optimizer in _UNBOUNDED:
        return None
    one_way = train.learning_rate * steps * (0.5 if train.lr_scheduler_type in _FALLING else 1.0)
    if adapter is None:
        return one_way
    return one_way * adapter.alpha / math.sqrt(3 * adapter.rank * TYPICAL_WIDTH)


@dataclass(frozen=True)
class LengthReport:
    """The length of a run as lines of text, and a warning if it can hardly change the model."""

    lines: list[str]
    warning: str | None = None

    def show(self) -> None:
        """Print the report as comments, so that the output of a dry run stays valid YAML."""
        for line in (*self.lines, *([f"warning: {self.warning}"] if self.warning else [])):
            print(f"# {line}")

    def log(self) -> None:
        """Log the report."""
        logger.info("%s", ";".join(self.lines))
        if self.warning is not None:
            logger.warning("%s", self.warning)


def report_length(config: TrainRLConfig, problems: int | None, unknown: str = "") -> LengthReport:
    """Report the length of a run.

    Args:
        problems: the number of training problems; None if unknown, for the reason in `unknown`.
    """
    train = config.train
    size = train.number_of_problems_per_batch * train.num_samples_per_problem
    batch = f"{train.number_of_problems_per_batch} × {train.num_samples_per_problem} = {size} conversations"
    length = run_length(train, problems)
    if length is None:
        return LengthReport(
            [
                f"training: {unknown}; every {train.number_of_problems_per_batch} of them are a batch of {batch} and "
                f"{train.mu} optimizer steps"
            ]
        )
    prefix = "" if problems is None else f"{problems} problems, "
    lines = [
        f"training: {prefix}{length.batches} batches of {batch}, {length.conversations} in all; {length.steps} "
        f"optimizer steps at a learning rate of {train.learning_rate:g}"
    ]
    moved = farthest_move(train, config.policy_model.adapter, length.steps)
    if moved is None:
        return LengthReport(lines)
    dtype = config.policy_model.vllm.dtype
    needed = ROUNDING_UNITS[dtype] * TYPICAL_WEIGHT
    lines.append(
        f"  they can move a weight by about {moved:.2g} at most, {_percent(moved)} of a typical one "
        f"({TYPICAL_WEIGHT:g}); the teacher's engine (dtype {dtype}) can tell {_percent(needed)}"
    )
    return LengthReport(lines, _warning(train, length.steps, moved, needed) if moved < needed else None)


def _warning(train: TrainConfig, steps: int, moved: float, needed: float) -> str:
    if moved == 0:
        return "Nothing will be learned: train.learning_rate is 0."
    factor = needed / moved
    return (
        f"This run can hardly teach anything: {steps} optimizer steps at train.learning_rate "
        f"{train.learning_rate:g} move a weight by less than the teacher's engine can tell. It takes "
        f"{math.ceil(steps * factor)} steps (train.epochs, train.max_steps) or a train.learning_rate of "
        f"{train.learning_rate * factor:.2g}, and usually several times that; "
        "config/train_rl/language_tutor_recipe.yaml shows a way, docs/algorithms.md the rule."
    )


def _percent(move: float) -> str:
    return f"{100 * move / TYPICAL_WEIGHT:.2g} %"


def load_training_problems(config: TrainRLConfig) -> list[Problem]:
    """The training problems, in the order that the seed gives.

    Raises:
        ConfigError: if they are too few for one batch.
        DataError: if a post-test is configured that cannot be held on one of them.
    """
    dataset, problems_per_batch = config.dataset, config.train.number_of_problems_per_batch
    problems = load_problems(dataset.train_datasets, dataset.max_train_examples, config.seed)
    problems = problems[config.skip_first_samples :]
    if len(problems) < problems_per_batch:
        raise ConfigError(
            f"{len(problems)} problems are left to train on (dataset.max_train_examples {dataset.max_train_examples}, "
            f"skip_first_samples {config.skip_first_samples}), but a batch has train.number_of_problems_per_batch = "
            f"{problems_per_batch}."
        )
    check_exams(config.generation, problems)
    return problems


def load_held_out_problems(config: TrainRLConfig, training: Sequence[Problem]) -> list[Problem]:
    """The lessons that are measured during a training on the problems `training`; [] without evaluations.

    Raises:
        ConfigError: if some of them are trained on, or they are more than a server plays at once.
        DataError: if a dataset cannot be used, or a post-test cannot be held on one of them.
    """
    options = config.evaluation
    if options.every == 0:
        return []
    problems = load_problems(options.eval_datasets, options.max_val_examples, config.seed)
    trained_on = len({problem.id for problem in training} & {problem.id for problem in problems})
    if trained_on:
        raise ConfigError(
            f"{trained_on} of the {len(problems)} lessons of evaluation.eval_datasets are among those that are trained "
            "on: what is measured on them says nothing about new ones. Name others."
        )
    if (count := len(problems) * options.num_samples_per_problem) > LARGEST_BATCH:
        raise ConfigError(
            f"evaluation asks for {len(problems)} × {options.num_samples_per_problem} = {count} conversations, but a "
            f"server holds {LARGEST_BATCH} at once: lower evaluation.max_val_examples."
        )
    check_exams(config.generation, problems)
    return problems


def report_length_before_training(config: TrainRLConfig) -> LengthReport:
    """`report_length` for programs that do not train: a dataset on the Hub is not downloaded to count its problems.

    Raises:
        DataError: if a dataset, or the template that makes problems of it, cannot be used.
        ConfigError: if the problems are too few for one batch, or some held-out ones are among them.
    """
    missing = next((source for source in config.dataset.train_datasets if not _is_here(source)), None)
    if missing is None:
        problems = load_training_problems(config)
        if all(map(_is_here, config.evaluation.eval_datasets)):
            load_held_out_problems(config, problems)  # its errors are told before anything is loaded
        return report_length(config, len(problems))
    return report_length(config, None, f"how many problems there are is known when {missing.name_or_path} is loaded")


def log_length_before_training(config: TrainRLConfig) -> None:
    """Log the length of the training when a server starts. A server needs no problems, so an error in them is logged as
    a warning."""
    try:
        report_length_before_training(config).log()
    except ClassroomError as error:
        logger.warning("a training would be refused: %s", error)


def _is_here(source: DatasetSource) -> bool:
    path = Path(source.name_or_path)
    return is_local_name(path) and path.is_file()
