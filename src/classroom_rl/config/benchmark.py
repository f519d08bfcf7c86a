"""Schema of a published benchmark in `eval.py`: which one, and who answers it (docs/evaluation.md)."""

from dataclasses import field
from typing import Literal, get_args

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.fields import Examples, FilePath, Flag, Text, config_group
from classroom_rl.config.model_checks import check_further_judges
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.values import EMBEDDED_JUDGES, RULES, check_url
from classroom_rl.errors import ConfigError

Benchmark = Literal["mrbench", "bea2025", "mathdial", "mathtutorbench", "tutorbench"]
MRBENCH, BEA2025, MATHDIAL, MATHTUTORBENCH, TUTORBENCH = BENCHMARKS = get_args(Benchmark)

PROBLEM_SOLVING, SOCRATIC_QUESTIONING = "problem_solving", "socratic_questioning"
SOLUTION_CORRECTNESS, MISTAKE_LOCATION, MISTAKE_CORRECTION = (
    "solution_correctness",
    "mistake_location",
    "mistake_correction",
)
SCAFFOLDING, PEDAGOGY = "scaffolding_generation", "pedagogy_following"
SCAFFOLDING_HARD, PEDAGOGY_HARD = f"{SCAFFOLDING}_hard", f"{PEDAGOGY}_hard"
TUTOR_TASKS = (
    *(PROBLEM_SOLVING, SOCRATIC_QUESTIONING, SOLUTION_CORRECTNESS, MISTAKE_LOCATION, MISTAKE_CORRECTION),
    *(SCAFFOLDING, PEDAGOGY, SCAFFOLDING_HARD, PEDAGOGY_HARD),
)
"""MathTutorBench's tasks, in the order of its leaderboard."""

TUTOR, JUDGE = "tutor", "judge"
"""Keys of `prompts_paths`: what asks a tutor for a message, and what asks a judge about one."""


@config_group
class BenchmarkConfig:
    """A published benchmark in place of conversations with a simulated student (docs/evaluation.md)."""

    name: Benchmark = MRBENCH
    """`mrbench`: judges label tutors' replies as people did. `bea2025`: the same, scored as in that shared task.
    `mathdial`: the tutor writes a teacher's next turn. `mathtutorbench`: a tutor's tasks. `tutorbench`: judges judge a
    tutor's reply by each row's criteria."""
    path: FilePath = ""
    """A .jsonl, .json or .parquet file or a Hub name; for `mathtutorbench` a clone of the benchmark's repository."""
    split: Text = "test"
    """Of a Hub name; `mathtutorbench` has it from the clone."""
    max_dialogues: Examples = -1
    """How many dialogues (of `mathtutorbench`: problems of each task; of `tutorbench`: rows) are read; fewer than all
    are drawn with `seed`."""
    train_path: FilePath = ""
    """For `bea2025`: labelled replies (MRBench, any version) on which a classifier is trained; dialogues that it shares
    with `path` are left out when they are predicted."""
    tasks: list[Text] = field(default_factory=list)
    """Those of `mathtutorbench` to measure."""
    prompts_paths: dict[str, FilePath] = field(default_factory=dict)
    """The prompt templates of `judge` and of `tutor`. `mathtutorbench` has its prompts from the clone; a template
    named by a task is asked in place of that task's, with the same variables."""
    is_chat: Flag = False
    """How `mathtutorbench` asks, as its own program's option: false continues the bare prompt (`/completions`), true
    sends it as the system message of a chat."""
    datasets: dict[str, FilePath] = field(default_factory=dict)
    """Of `mathtutorbench`: local copies of data sets, by the `dataset_path` or `dataset_path/dataset_name` that the
    clone's configs name, such as `gsm8k/main`. Each is a data file, or the folder of a data set of the Hub."""
    reward_url: Text | None = None
    """Of `mathtutorbench`: the address of a vLLM server of `pedagogical_reward_model`, without `/v1`. Null: the model
    is loaded in this process."""


def has_tutor(benchmark: BenchmarkConfig) -> bool:
    """Whether a tutor answers the benchmark; in MRBench the tutors' replies are a part of the data."""
    return benchmark.name not in (MRBENCH, BEA2025)


def needed_prompts(benchmark: BenchmarkConfig) -> list[str]:
    """The keys that `prompts_paths` must have."""
    if benchmark.name == MATHTUTORBENCH:
        return []
    return [JUDGE, TUTOR] if has_tutor(benchmark) else [JUDGE]


def check_benchmark(benchmark: BenchmarkConfig, judges: list[JudgeModelConfig], generation: GenerationConfig) -> None:
    """Check which benchmark is read, what asks a tutor or a judge, and who labels. Raises a `ConfigError` naming the
    key, the rule and the fix."""
    if not benchmark.path:
        raise ConfigError("benchmark.path is empty; name the benchmark's file or clone, or its name on the Hub.")
    _check_tasks(benchmark)
    missing = [key for key in needed_prompts(benchmark) if key not in benchmark.prompts_paths]
    if missing:
        raise ConfigError(
            f"benchmark.prompts_paths has no template for {', '.join(missing)}; name one, as "
            f"config/eval/{benchmark.name}.yaml does."
        )
    if not has_tutor(benchmark) and not judges and not benchmark.train_path:
        raise ConfigError("judges is empty; name who is compared with people: judges=[{model_name_or_path: rules}].")
    if benchmark.train_path and benchmark.name != BEA2025:
        raise ConfigError(f"benchmark.train_path is {benchmark.train_path}, but only {BEA2025} trains: leave it out.")
    if benchmark.name == TUTORBENCH and (not judges or any(judge.model_name_or_path == RULES for judge in judges)):
        raise ConfigError(
            f"judges is {[judge.model_name_or_path for judge in judges]}; only models can judge tutorbench's criteria: "
            "judges=[{model_name_or_path: google/gemini-2.5-flash, use_openrouter: true}]."
        )
    if benchmark.name == MATHTUTORBENCH and judges:
        raise ConfigError("judges is set, but no judge takes part in mathtutorbench: leave it out.")
    _check_labelling_judges(judges, generation)


def _check_tasks(benchmark: BenchmarkConfig) -> None:
    if benchmark.name != MATHTUTORBENCH:
        for key in ("tasks", "is_chat", "datasets", "reward_url"):
            if getattr(benchmark, key):
                raise ConfigError(f"benchmark.{key} is set, but only mathtutorbench has {key}: leave it out.")
        return
    unknown = [task for task in benchmark.tasks if task not in TUTOR_TASKS]
    if unknown or not benchmark.tasks or len(set(benchmark.tasks)) < len(benchmark.tasks):
        raise ConfigError(
            f"benchmark.tasks is {benchmark.tasks}; it must name one or more of {', '.join(TUTOR_TASKS)}, each once."
        )
    unknown_prompts = [key for key in benchmark.prompts_paths if key not in TUTOR_TASKS]
    if unknown_prompts:
        raise ConfigError(
            f"benchmark.prompts_paths names {', '.join(unknown_prompts)}; of mathtutorbench it names tasks."
        )
    if benchmark.reward_url is not None:
        check_url("benchmark.reward_url", benchmark.reward_url)


def _check_labelling_judges(judges: list[JudgeModelConfig], generation: GenerationConfig) -> None:
    """Check that each of `judges` can label single replies, and is named once."""
    for judge in judges:
        name = judge.model_name_or_path
        if judge.rubric is not None:
            raise ConfigError(f"judges has a rubric for {name}, but a benchmark asks its own questions: leave it out.")
        if name in EMBEDDED_JUDGES and name != RULES:
            raise ConfigError(
                f"judges has {name}, which reads lessons of the quickstart only; of the embedded judges {RULES} labels "
                "single replies."
            )
    allowed = f"behind an API (use_openrouter, use_gemini or base_url, also that of a vLLM server), or {RULES}"
    check_further_judges("judges", judges, generation, allowed)
