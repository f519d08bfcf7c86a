"""The range of every number in a configuration, in one table. Rules between several keys are in `config/checks.py`.

Where no rule sets the upper end, the table has a sanity limit: larger than any run needs, and small enough for the
libraries.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from classroom_rl.config.base import (
    ApiModelConfig,
    DataSource,
    JudgeModelConfig,
    JudgingConfig,
    LimitsConfig,
    LoggingConfig,
    LoraConfig,
    PostTestConfig,
    ServerConfig,
    SupervisionConfig,
    SupervisorModelConfig,
    ToolLimitsConfig,
    VllmConfig,
)
from classroom_rl.config.benchmark import BenchmarkConfig
from classroom_rl.config.evaluation import CounterfactualsConfig, EvalConfig, EvalDatasetConfig
from classroom_rl.config.train_rl import (
    CorrectionsConfig,
    GuardsConfig,
    PPOConfig,
    TrainConfig,
    TrainDatasetConfig,
    TrainRLConfig,
    TurnCreditConfig,
)
from classroom_rl.config.train_sft import (
    TrainSFTConfig,
    TrainSFTDatasetConfig,
    TrainSFTModelConfig,
    TrainSFTTrainConfig,
)
from classroom_rl.config.values import LARGEST_SEED, each_field
from classroom_rl.errors import ConfigError

COUNT, TOKENS, STEPS = 10**6, 10**8, 10**9
SECONDS = 10**7
"""About four months; no timer overflows with it."""
NUMBERS = (int, float, int | None, float | None)


@dataclass(frozen=True)
class Range:
    """The allowed values of a number.

    Attributes:
        least, most: the ends, both allowed unless `open_below` or `open_above` excludes one.
        rule: the range in words, without the upper end if that is a sanity limit.
        sanity_limit: whether `most` is a sanity limit.
        also: one more allowed number, outside the range, with a meaning of its own.
    """

    least: float
    most: float
    rule: str
    sanity_limit: bool = False
    open_below: bool = False
    open_above: bool = False
    also: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a number is allowed; nan and infinity never are."""
        if value == self.also:
            return True
        above = value > self.least if self.open_below else value >= self.least
        return above and (value < self.most if self.open_above else value <= self.most)

    def rule_for(self, value: float) -> str:
        """The rule that a number outside the range breaks."""
        if self.sanity_limit and isinstance(value, float) and not math.isfinite(value):
            return f"{self.rule}, and finite"
        return f"it must be at most {self.most}" if self.sanity_limit and value > self.most else self.rule


def at_least(least: float, most: float, rule: str | None = None, also: float | None = None) -> Range:
    """`least` or more; `most` is a sanity limit."""
    return Range(least, most, rule or f"it must be at least {least}", sanity_limit=True, also=also)


def above(least: float, most: float) -> Range:
    """More than `least`; `most` is a sanity limit."""
    return Range(least, most, f"it must be above {least}", sanity_limit=True, open_below=True)


def between(least: float, most: float) -> Range:
    """From `least` to `most`, both allowed."""
    return Range(least, most, f"it must be from {least} to {most}")


EXAMPLES = at_least(1, COUNT * 1000, "it must be at least 1, or -1 for all", also=-1)
SEED = between(0, LARGEST_SEED)
DEADLINE = above(0, SECONDS)
SHARE = Range(0, 1, "it is a share above 0 and at most 1", open_below=True)

BOUNDS: dict[type, dict[str, Range]] = {
    VllmConfig: {
        "temperature": at_least(0, 100),
        "top_k": at_least(1, COUNT, "it is at least 1, or -1 for no limit", also=-1),
        "top_p": Range(0, 1, "it is above 0 and at most 1", open_below=True),
        "max_length": at_least(2, TOKENS),
        "max_num_seqs": at_least(1, COUNT),
        "gpu_memory_utilization": Range(
            0,
            1,
            "it is the share of the GPU's memory that the engine may take, above 0 and at most 1",
            open_below=True,
        ),
        "number_of_gpus_per_instance": at_least(1, 1024),
        "cpu_kvcache_gib": at_least(1, COUNT),
    },
    LoraConfig: {
        "rank": at_least(1, COUNT),
        "alpha": at_least(1, COUNT),
        "dropout": Range(0, 1, "it is a share of at least 0 and below 1", open_above=True),
    },
    ApiModelConfig: {
        "max_concurrent_requests": at_least(1, COUNT),
        "requests_per_minute": at_least(1, COUNT),
        "tokens_per_minute": at_least(1, COUNT * 1000),
        "request_timeout_s": DEADLINE,
        "deadline_s": DEADLINE,
        "usd_per_million_prompt_tokens": at_least(0, COUNT),
        "usd_per_million_completion_tokens": at_least(0, COUNT),
        "max_cost_usd": at_least(0, COUNT * 1000),
    },
    JudgeModelConfig: {
        "replies_per_attempt": at_least(1, 1000),
        "max_failed_share": between(0, 1),
        "anchor_share": between(0, 1),
    },
    SupervisorModelConfig: {"replies_per_review": at_least(1, 1000)},
    SupervisionConfig: {
        "max_retries": at_least(1, 100),
        "share": between(0, 1),
        "anneal_steps": at_least(0, STEPS),
        "max_tokens": at_least(1, TOKENS),
    },
    ToolLimitsConfig: {"calls": between(1, 100), "seconds": DEADLINE, "characters": between(1, COUNT)},
    PostTestConfig: {"siblings": between(1, 100), "max_tokens_per_answer": at_least(1, TOKENS)},
    LimitsConfig: {
        "max_turns": at_least(1, 10_000, "it counts messages and must be at least 1"),
        "max_tokens_in_conversation": at_least(1, TOKENS),
        "max_tokens_per_turn": at_least(1, TOKENS),
    },
    ServerConfig: {
        "server_port": between(1, 65535),
        "server_index": at_least(0, COUNT),
        "server_start_timeout_s": DEADLINE,
        "sample_timeout_s": DEADLINE,
        "load_weights_timeout_s": DEADLINE,
        "turn_timeout_s": DEADLINE,
    },
    JudgingConfig: {
        "max_tokens_per_student_attempt": at_least(1, TOKENS),
        "max_tokens_per_judge_attempt": at_least(1, TOKENS),
        "number_student_attempts": at_least(0, 10_000),
        "number_judge_attempts": at_least(0, 10_000),
        "extra_penalty_for_rejected_judges": at_least(0, COUNT),
        "low_score_threshold": between(0, 1),
        "answer_timeout_s": DEADLINE,
    },
    DataSource: {"ratio": SHARE},
    LoggingConfig: {"save_steps": at_least(0, STEPS)},
    TrainConfig: {
        "number_of_problems_per_batch": at_least(1, COUNT),
        "num_samples_per_problem": at_least(
            2, COUNT, "GRPO compares the conversations of a group and needs at least 2"
        ),
        "per_device_train_batch_size": at_least(1, COUNT),
        "max_tokens_per_micro_batch": at_least(1, COUNT),
        "learning_rate": at_least(0, 1000),
        "epochs": at_least(0, COUNT),
        "max_steps": at_least(0, STEPS, "it must be at least 1, or -1 to count epochs", also=-1),
        "beta": at_least(0, COUNT),
        "mu": at_least(1, COUNT),
        "epsilon": above(0, COUNT),
        "epsilon_high": above(0, COUNT),
        "max_grad_norm": at_least(0, 1e30),
        "importance_sampling_clip_max": above(0, COUNT),
        "resample_up_to": at_least(1, COUNT),
        "keep_published_policies": at_least(1, COUNT),
        "publish_to_disk_every": at_least(1, STEPS),
        "max_staleness": between(0, 1),
        "gpu_memory_gib": above(0, COUNT),
    },
    TurnCreditConfig: {"weight": at_least(0, COUNT), "gamma": between(0, 1)},
    CorrectionsConfig: {
        "weight": at_least(0, COUNT),
        "interval": at_least(1, STEPS),
        "min_examples": at_least(1, COUNT),
        "epochs": at_least(1, COUNT),
        "learning_rate": at_least(0, 1000),
        "max_kl": above(0, COUNT),
        "capacity": at_least(1, COUNT),
        "replay": at_least(0, COUNT),
        "rows_per_batch": at_least(1, COUNT),
        "pass_batch_size": at_least(1, COUNT),
    },
    PPOConfig: {
        "gamma": between(0, 1),
        "lam": between(0, 1),
        "value_lam": between(0, 1),
        "value_learning_rate": at_least(0, 1000),
        "value_weight": at_least(0, COUNT),
        "value_clip": above(0, COUNT),
        "value_warmup_steps": at_least(0, STEPS),
        "entropy_weight": at_least(0, COUNT),
        "target_kl": above(0, COUNT),
    },
    TrainDatasetConfig: {"max_train_examples": EXAMPLES},
    GuardsConfig: {
        "judge_check_every_n_steps": at_least(0, STEPS),
        "judge_check_sample": at_least(1, COUNT),
        "largest_gap_growth": between(0, 1),
        "largest_canary_score": between(0, 1),
        "judge_check_timeout_s": DEADLINE,
    },
    TrainRLConfig: {"skip_first_samples": at_least(0, STEPS), "seed": SEED},
    TrainSFTTrainConfig: {
        "gradient_accumulation_steps": at_least(1, COUNT),
        "per_device_train_batch_size": at_least(1, COUNT),
        "learning_rate": at_least(0, 1000),
        "warmup": at_least(0, STEPS),
        "epochs": at_least(0, COUNT),
        "max_steps": at_least(0, STEPS, "it must be at least 1, or -1 to count epochs", also=-1),
    },
    TrainSFTModelConfig: {"max_length": at_least(2, TOKENS)},
    TrainSFTDatasetConfig: {"max_train_examples": EXAMPLES, "max_val_examples": EXAMPLES},
    TrainSFTConfig: {"seed": SEED},
    EvalConfig: {"num_samples_per_problem": at_least(1, COUNT), "seed": SEED},
    EvalDatasetConfig: {"max_val_examples": EXAMPLES},
    BenchmarkConfig: {"max_dialogues": EXAMPLES},
    CounterfactualsConfig: {
        "forks": at_least(0, COUNT),
        "playouts": between(8, 4096),
        "siblings": between(1, 4096),
    },
}
"""Maps a group of keys to the ranges of its numbers. Subclasses inherit the ranges of their base."""


ANY_NUMBER = at_least(-(10**15), 10**15)


def range_of(group: type, name: str) -> Range | None:
    """The range of the key `name` in a group; None if the table has none."""
    return next((BOUNDS[each][name] for each in group.__mro__ if name in BOUNDS.get(each, {})), None)


def check_numbers(config: Any) -> None:
    """Raise a `ConfigError` if a number is out of its range."""
    for group, item, key in each_field(config):
        value = getattr(group, item.name)
        allowed = range_of(type(group), item.name) or ANY_NUMBER
        for number in [value] if item.type in NUMBERS else _whole_numbers(value):
            if number is not None and not allowed.holds(number):
                raise ConfigError(f"{key} is {_shown(number)}; {allowed.rule_for(number)}.")


def _whole_numbers(value: Any) -> Iterator[int]:
    """The integers in a value, and in the lists and mappings that it holds."""
    if isinstance(value, int):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _whole_numbers(each)


def _shown(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to convert the longest integers to text
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} and more"
    return str(value)
