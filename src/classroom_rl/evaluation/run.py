"""Evaluates a tutor: plays fixed conversations with it and writes metrics and conversations into a run folder.

A maths tutor is also measured by the student's solutions before and after the dialogue, and its messages by a
pedagogical reward model, which is loaded after the other models have shut down.
"""

import asyncio
import json
import time
from typing import Any, Optional

from classroom_rl.config.evaluation import EvalConfig, is_measured_by_solutions
from classroom_rl.config.load import record_run
from classroom_rl.evaluation.compare import compare_tutors
from classroom_rl.evaluation.counterfactuals.comparing import check_outcomes
from classroom_rl.evaluation.counterfactuals.figures import (
    counterfactual_figures,
    counterfactual_table,
    write_comparisons,
)
from classroom_rl.evaluation.held_out import load_measured_problems, what_was_trained_on
from classroom_rl.evaluation.metrics.compared import post_test_figures
from classroom_rl.evaluation.metrics.language import language_metrics
from classroom_rl.evaluation.metrics.level import LEVEL, level_by_lesson, measured_level
from classroom_rl.evaluation.metrics.maths import check_scorer, score_messages, summarise_maths
from classroom_rl.evaluation.metrics.readings import reading_metrics
from classroom_rl.evaluation.metrics.supervision import DIFFERENCE, supervised_difference, supervision_figures
from classroom_rl.evaluation.playing import EvaluationResult, play_all
from classroom_rl.evaluation.prompt_search import search_prompt
from classroom_rl.evaluation.published.run import run_benchmark
from classroom_rl.evaluation.report.tables import POST_TEST, measurement_table
from classroom_rl.evaluation.students import compare_students
from classroom_rl.judges.difficulty import LevelRules
from classroom_rl.judges.post_test.exams import check_exams
from classroom_rl.judges.readings import MessageReaders
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME, write_records
from classroom_rl.results.statistics import summarise
from classroom_rl.results.trackers import log_to_wandb
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.server.open_models import open_readers
from classroom_rl.system.storage import write_whole


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """Evaluate one tutor and write `metrics.json` and `conversations.parquet` into `logging.save_dir`, with
    `counterfactuals` also `counterfactuals.json`. If the configuration names `tutors`, compare them with
    `compare_tutors`; if it names `students`, these with `compare_students`; if a `benchmark`, run it with
    `run_benchmark`; with `prompt_search`, search with `search_prompt`. Returns the content of metrics.json.

    Raises:
        DataError: if the datasets hold no problem, or one without a post-test although one is configured; or if the
            trained move classifiers are missing or damaged.
        PolicyMismatch: if the server's tutor changed while it was measured.
        EngineFailure, DeadlineExceeded: if the tutor cannot be reached, or does not answer.
    """
    if config.benchmark is not None:
        return run_benchmark(config)
    if config.tutors:
        return compare_tutors(config)
    if config.students:
        return compare_students(config)
    if config.prompt_search is not None:
        return search_prompt(config)
    problems, trained_on = load_measured_problems(config)
    readers, level = open_readers(config.generation), measured_level(config, problems)
    if config.server_url is None:
        check_exams(config.generation, problems)
    if config.counterfactuals.forks > 0:
        check_outcomes(config, problems)
    folder = record_run(config, "eval")
    uses_scorer = is_measured_by_solutions(config) and config.score_using_pedagogical_reward
    if uses_scorer:
        check_scorer(config)
    result = asyncio.run(play_all(config, problems, folder))
    conversations = folder / CONVERSATIONS_NAME
    write_records(conversations, result.records, result.initial)  # already here, because scoring may fail
    if uses_scorer:
        started = time.monotonic()
        result.scores = asyncio.run(score_messages(config, [record for _, record in result.records]))
        result.about["seconds"] += round(time.monotonic() - started, 3)
        write_records(conversations, result.records, result.initial, result.scores)
    metrics = _summarise(config, result, readers, level)
    metrics |= {"problems_trained_on": trained_on} if trained_on else {}
    write_whole(folder / "metrics.json", json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    print(measurement_table(metrics))
    paths = [folder / "metrics.json", conversations]
    if result.compared is not None:
        print(f"\n{counterfactual_table(metrics['counterfactuals'])}")
        paths.append(write_comparisons(folder, result.compared))
    print("\n" + "\n".join(map(str, paths)))
    for run, count in trained_on.items():
        print(f"warning: {what_was_trained_on(run, count, len(problems))}")
    log_to_wandb(config, metrics, folder)
    return metrics


def _summarise(
    config: EvalConfig,
    result: EvaluationResult,
    readers: Optional[MessageReaders],
    level: Optional[LevelRules],
) -> dict[str, Any]:
    """The content of metrics.json."""
    metrics = dict(result.about)
    by_sampling = {sampling: result.of(sampling) for sampling in config.samplings}
    for sampling, records in by_sampling.items():
        metrics[sampling] = summarise(records)
        if is_measured_by_solutions(config):
            by_answer = not config.reward_model.is_model
            metrics[sampling] |= summarise_maths(records, result.initial, result.scores_of(sampling), by_answer)
        else:
            metrics[sampling] |= language_metrics(records, result.labels)
        if readers is not None:
            metrics[sampling]["readings"] = reading_metrics(records, readers, result.labels)
        if level is not None:
            figures = level_by_lesson(records, level)
            metrics[sampling][LEVEL] = {name: mean_with_ci(values) for name, values in figures.items()}
        if figures := post_test_figures(records):
            metrics[sampling][POST_TEST] = figures
        if figures := supervision_figures(records):
            metrics[sampling]["supervision"] = figures
    if result.compared is not None:
        metrics["counterfactuals"] = counterfactual_figures(result.compared)
    if difference := supervised_difference(by_sampling):
        metrics[DIFFERENCE] = difference
    return metrics
