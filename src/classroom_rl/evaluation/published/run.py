"""Runs a published benchmark: has judges or a tutor answer it, and writes metrics.json into the run folder."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from classroom_rl.config.benchmark import MATHDIAL, MATHTUTORBENCH, MRBENCH, BenchmarkConfig, needed_prompts
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import record_run
from classroom_rl.evaluation.published.checked_rows import digest_of
from classroom_rl.evaluation.published.continuation import continue_dialogues
from classroom_rl.evaluation.published.reply_labels import compare_judges
from classroom_rl.evaluation.published.tables import continuation_table, judges_table, tasks_table
from classroom_rl.evaluation.published.tutor_tasks import do_tasks
from classroom_rl.results.trackers import log_to_wandb
from classroom_rl.rollout.prompts import variables_of
from classroom_rl.system.storage import write_whole

Job = Callable[[EvalConfig, BenchmarkConfig, Path], Awaitable[dict[str, Any]]]
JOBS: dict[str, tuple[Job, Callable[[dict[str, Any]], str]]] = {
    MRBENCH: (compare_judges, judges_table),
    MATHDIAL: (continue_dialogues, continuation_table),
    MATHTUTORBENCH: (do_tasks, tasks_table),
}
"""Benchmark → what measures it, and its table."""


def run_benchmark(config: EvalConfig) -> dict[str, Any]:
    """Measure what `config.benchmark` asks for, print a table, and write `metrics.json` into `logging.save_dir`.

    What was paid for stays in ledgers there, so the same command goes on after an interruption without paying twice.

    Returns:
        The content of metrics.json.

    Raises:
        ConfigError, DataError: if the benchmark, a prompt, a model or a key is missing or wrong.
        EngineFailure, ProviderFailure: if a tutor or a judge cannot be asked at all.
    """
    benchmark = config.benchmark
    check_benchmark_prompts(config)
    folder = record_run(config, "eval")
    job, table = JOBS[benchmark.name]
    started = time.monotonic()
    found = asyncio.run(job(config, benchmark, folder))
    metrics = {
        "benchmark": benchmark.name,
        "path": benchmark.path,
        "sha256": digest_of(benchmark.path),
        "seed": config.seed,
        **found,
        "seconds": round(time.monotonic() - started, 3),
    }
    write_whole(folder / "metrics.json", json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    print(table(metrics))
    print(f"\n{folder / 'metrics.json'}")
    log_to_wandb(config, metrics, folder)
    return metrics


def check_benchmark_prompts(config: EvalConfig) -> None:
    """Check that the prompt templates are there and parse, before anything is loaded or paid.

    Raises:
        DataError: naming the template.
    """
    for key in needed_prompts(config.benchmark):
        variables_of(config.benchmark.prompts_paths[key])
