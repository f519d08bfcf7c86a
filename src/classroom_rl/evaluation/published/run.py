"""Runs a published benchmark with judges or a tutor, and writes metrics.json into the run folder."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from classroom_rl.config.benchmark import (
    BEA2025,
    MATHDIAL,
    MATHTUTORBENCH,
    MRBENCH,
    TUTORBENCH,
    BenchmarkConfig,
    needed_prompts,
)
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import record_run
from classroom_rl.evaluation.published.bea2025 import score_systems, systems_table
from classroom_rl.evaluation.published.checked_rows import digest_of
from classroom_rl.evaluation.published.mathdial import continue_dialogues
from classroom_rl.evaluation.published.mathtutorbench.run import do_tasks
from classroom_rl.evaluation.published.mathtutorbench.table import tasks_table
from classroom_rl.evaluation.published.mrbench import DIMENSIONS, compare_judges
from classroom_rl.evaluation.published.tutorbench import judge_replies
from classroom_rl.evaluation.report.tables import NO_VALUE, align, causes_text, estimate_text, interval_text
from classroom_rl.results.trackers import log_to_wandb
from classroom_rl.rollout.prompts import variables_of
from classroom_rl.system.storage import write_whole

_NOT_ANSWERED = "not answered"


def judges_table(metrics: Mapping[str, Any]) -> str:
    """MRBench: every judge's agreement with people in each dimension, then its cost."""
    judges = metrics["judges"]
    header = ["people's commonest answer", *judges]
    kappas = [["κ of all answers", *header]]
    yes = [["κ of yes", "people's yes", *judges]]
    for name in DIMENSIONS:
        dimensions = [judge["dimensions"].get(name) for judge in judges.values()]
        people = metrics["people"][name]
        kappas.append([name, f"{people['commonest']} {people['share']:.0%}", *map(_all_answers, dimensions)])
        yes.append([name, f"{people['yes']:.0%}", *map(_of_yes, dimensions)])
    kappas.append(["mean", "", *(estimate_text(judge["mean_kappa"], "mean") for judge in judges.values())])
    calls = [["calls", *judges], *_calls(judges)]
    opening = f"\n{metrics['replies']} replies in {metrics['dialogues']} dialogues; 95 % intervals over dialogues"
    lines = [
        f"{pair['judge']} minus {pair['against']}: mean κ {pair['mean']:+.2f} {interval_text(pair['ci95'], '+.2f')} "
        f"on {pair['replies']} replies"
        for pair in metrics["differences"]
    ]
    return "\n\n".join([opening, *map(align, (kappas, yes, calls)), *(["\n".join(lines)] if lines else [])])


def _all_answers(dimension: Mapping[str, Any] | None) -> str:
    if dimension is None or "kappa" not in dimension:
        return _NOT_ANSWERED
    return f"{estimate_text(dimension, 'kappa')}, right {dimension['accuracy']['mean']:.0%}"


def _of_yes(dimension: Mapping[str, Any] | None) -> str:
    if dimension is None or dimension["yes"] is None:
        return _NOT_ANSWERED
    return estimate_text(dimension["yes"], "kappa")


def _calls(judges: Mapping[str, Any]) -> list[list[str]]:
    rows = {"answered": [], "no verdict": [], "spent": [], "per 1,000 verdicts": []}
    for judge in judges.values():
        spending = judge.get("paid")
        if spending is None:
            for cells in rows.values():
                cells.append("no calls")
            continue
        rows["answered"].append(f"{judge['answered']} of {judge['asked']}")
        rows["no verdict"].append(causes_text(judge["failures"]))
        rows["spent"].append(f"${spending['cost_usd']:.4f}")
        price = 1000 * spending["cost_usd"] / judge["answered"] if judge["answered"] else None
        rows["per 1,000 verdicts"].append(NO_VALUE if price is None else f"${price:.4f}")
    return [[name, *cells] for name, cells in rows.items()]


def continuation_table(metrics: Mapping[str, Any]) -> str:
    """MathDial: the tutor's and the human teacher's share of telling turns, by each labeller."""
    own_labels = metrics["telling_by_the_teachers_own_label"]
    rows = [["labelled by", "label", "tutor", "teacher", "tutor − teacher", "turns", "κ with the teachers' own label"]]
    for name, labeller in metrics["labellers"].items():
        for label, sides in labeller["shares"].items():
            agreement = labeller["agreement_on_telling"] if label == "telling" else None
            rows.append(
                [
                    name,
                    label,
                    estimate_text(sides["tutor"], "mean"),
                    estimate_text(sides["teacher"], "mean"),
                    estimate_text(sides["difference"], "mean", "+.2f"),
                    str(labeller["turns_compared"]),
                    NO_VALUE if agreement is None else estimate_text(agreement, "kappa"),
                ]
            )
    words = {side: NO_VALUE if mean is None else f"{mean:.0f}" for side, mean in metrics["words"].items()}
    opening = (
        f"\n{metrics['tutor']} on {metrics['turns']} turns in {metrics['dialogues']} dialogues; 95 % intervals over "
        f"dialogues. No reply: {causes_text(metrics['failures'])}; cut off: {metrics['cut']}. Words per turn: tutor "
        f"{words['tutor']}, teacher {words['teacher']}.\nBy the teachers' own labels "
        f"{estimate_text(own_labels, 'mean')} of their turns tell."
    )
    judge_lines = [
        f"{name}: {labeller['answered']} of {labeller['asked']} calls answered; no verdict: "
        f"{causes_text(labeller['failures'])}; spent ${labeller['paid']['cost_usd']:.4f}"
        for name, labeller in metrics["labellers"].items()
        if "paid" in labeller
    ]
    return "\n\n".join([opening, align(rows), *judge_lines])


def rubrics_table(metrics: Mapping[str, Any]) -> str:
    """TutorBench: each judge's weighted score of the tutor's replies, of all and by use case."""
    rows = [["judge", "replies", "rows", "score", "criteria met"]]
    for name, judge in metrics["judges"].items():
        for replies, figures in judge["scores"].items():
            estimates = (estimate_text(figures[key], "mean") for key in ("score", "met"))
            rows.append([name, replies, str(figures["score"]["n"]), *estimates])
    left_out = ", ".join(f"{count} {cause}" for cause, count in metrics["left_out"].items()) or "none"
    opening = (
        f"\n{metrics['tutor']} on {metrics['rows']} rows; 95 % intervals over rows. Left out: {left_out}. No reply, "
        f"scored 0: {causes_text(metrics['failures'])}; cut off: {metrics['cut']}."
    )
    calls = [["calls", *metrics["judges"]], *_calls(metrics["judges"])]
    return "\n\n".join([opening, align(rows), align(calls)])


Job = Callable[[EvalConfig, BenchmarkConfig, Path], Awaitable[dict[str, Any]]]
"""Runs a benchmark in a folder and returns its entries of metrics.json. Raises what `run_benchmark` does."""
JOBS: dict[str, tuple[Job, Callable[[dict[str, Any]], str]]] = {
    MRBENCH: (compare_judges, judges_table),
    BEA2025: (score_systems, systems_table),
    MATHDIAL: (continue_dialogues, continuation_table),
    MATHTUTORBENCH: (do_tasks, tasks_table),
    TUTORBENCH: (judge_replies, rubrics_table),
}
"""Benchmark → the function that runs it, and the one that formats its results."""


def run_benchmark(config: EvalConfig) -> dict[str, Any]:
    """Run `config.benchmark`, print a table, and write `metrics.json` into `logging.save_dir`; returns its content.

    Paid replies are kept in ledgers there, so the same command continues after an interruption without paying twice.

    Raises:
        ConfigError, DataError: if the benchmark, a prompt, a model or a key is missing or wrong, or the move
            classifiers were trained on this benchmark.
        EngineFailure, ProviderFailure: if a tutor or a judge cannot be asked at all.
    """
    benchmark = config.benchmark
    check_benchmark_prompts(config)
    folder = record_run(config, "eval")
    job, table = JOBS[benchmark.name]
    started = time.monotonic()
    results = asyncio.run(job(config, benchmark, folder))
    metrics = {
        "benchmark": benchmark.name,
        "path": benchmark.path,
        "sha256": digest_of(benchmark.path),
        "seed": config.seed,
        **results,
        "seconds": round(time.monotonic() - started, 3),
    }
    write_whole(folder / "metrics.json", json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    print(table(metrics))
    print(f"\n{folder / 'metrics.json'}")
    log_to_wandb(config, metrics, folder)
    return metrics


def check_benchmark_prompts(config: EvalConfig) -> None:
    """Check that the prompt templates exist and parse, before anything is loaded or paid. Raises `DataError`, naming
    the template."""
    for key in dict.fromkeys([*needed_prompts(config.benchmark), *config.benchmark.prompts_paths]):
        variables_of(config.benchmark.prompts_paths[key])
