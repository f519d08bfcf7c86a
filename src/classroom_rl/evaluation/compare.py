"""Compares several tutors and the control arms on the same lessons, seeds and error schedules."""

import asyncio
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from classroom_rl.config.evaluation import (
    ACKNOWLEDGES,
    BASE,
    IDEAL,
    EvalConfig,
    TutorConfig,
    is_measured_by_solutions,
    model_of_tutor,
    reward_weights,
)
from classroom_rl.config.load import record_run
from classroom_rl.config.models import ApiModelConfig
from classroom_rl.config.values import RULES_VERSION, SCRIPT
from classroom_rl.evaluation.extra_judges import JudgeScores, ask_extra_judges, summarise_judges
from classroom_rl.evaluation.held_out import load_measured_problems, what_was_trained_on
from classroom_rl.evaluation.metrics.compared import READ, figures_by_lesson, figures_of, judged_by_lesson
from classroom_rl.evaluation.metrics.level import measured_level
from classroom_rl.evaluation.metrics.maths import InitialSolutions, check_scorer, maths_by_problem, score_messages
from classroom_rl.evaluation.metrics.readings import about_readers
from classroom_rl.evaluation.metrics.supervision import DIFFERENCE, supervised_difference
from classroom_rl.evaluation.playing import EvaluationResult, play_all
from classroom_rl.evaluation.report.comparison import comparison_text, write_comparison_report
from classroom_rl.judges.messages import read_plan
from classroom_rl.judges.post_test.exams import check_exams
from classroom_rl.judges.readings import MessageReaders
from classroom_rl.models.lora import merge_adapter
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME, write_compared
from classroom_rl.results.statistics import ByLesson, counted_share, differences, lacks_verdict
from classroom_rl.results.trackers import log_to_wandb
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.problem import Problem
from classroom_rl.server.open_models import open_readers
from classroom_rl.system.storage import write_whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arm:
    """A tutor of a comparison. `config` is None for the untrained base; `script` names a control arm."""

    name: str
    config: TutorConfig | None = None
    script: str | None = None


def compare_tutors(config: EvalConfig) -> dict[str, Any]:
    """Evaluate `teacher_model` (the untrained base), each of `tutors`, and the control arms, one after the other, and
    write `metrics.json`, `conversations.parquet` and `report.html` into `logging.save_dir`; returns the content of
    metrics.json.

    Raises:
        ConfigError, DataError: if a tutor's folder holds no model or adapter, or the trained move classifiers are
            missing or damaged.
        The errors of `classroom_rl.evaluation.playing.play_all`.
    """
    problems, trained_on = load_measured_problems(config)
    readers = open_readers(config.generation)
    measured_level(config, problems)  # refuses lessons without a level before anything is played
    check_exams(config.generation, problems)
    folder = record_run(config, "eval")
    uses_scorer = is_measured_by_solutions(config) and config.score_using_pedagogical_reward
    if uses_scorer:
        check_scorer(config)
    results: dict[str, EvaluationResult] = {}
    initial: InitialSolutions | None = None  # the student's own, the same for all tutors
    for arm in arms_of(config, problems):
        logger.info("measuring the tutor %s", arm.name)
        tutor_folder = folder / "tutors" / arm.name
        tutor_folder.mkdir(parents=True, exist_ok=True)
        with config_of_arm(arm, config, tutor_folder) as arm_config:
            results[arm.name] = asyncio.run(play_all(arm_config, problems, tutor_folder, initial))
        initial = results[arm.name].initial
    conversations = {name: result.records for name, result in results.items()}
    write_compared(folder / CONVERSATIONS_NAME, conversations)  # already here, because what follows may fail
    records = {name: [record for _, record in pairs] for name, pairs in conversations.items()}
    if uses_scorer:
        scores = iter(asyncio.run(score_messages(config, [record for group in records.values() for record in group])))
        for result in results.values():
            result.scores = [next(scores) for _ in result.records]
    extra_scores, spending = asyncio.run(ask_extra_judges(config, records, folder))
    metrics = summarise_comparison(config, results, extra_scores, readers)
    metrics["extra_judges_paid"] = spending
    metrics |= {"problems_trained_on": trained_on} if trained_on else {}
    write_whole(folder / "metrics.json", json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    report = write_comparison_report(folder, metrics, conversations)
    print(comparison_text(metrics))
    print(f"\n{folder / 'metrics.json'}\n{folder / CONVERSATIONS_NAME}\n{report}")
    for run, count in trained_on.items():
        print(f"warning: {what_was_trained_on(run, count, len(problems))}")
    log_to_wandb(config, metrics, folder)
    return metrics


def arms_of(config: EvalConfig, problems: Sequence[Problem]) -> list[Arm]:
    """The untrained base, the tutors, and the control arms: the tutor that only acknowledges, and the scripted ideal
    tutor if all lessons are the quickstart's."""
    arms = [Arm(BASE), *(Arm(tutor.name, tutor) for tutor in config.tutors), Arm(ACKNOWLEDGES, script=ACKNOWLEDGES)]
    if all(read_plan(problem.text).lesson for problem in problems):
        arms.append(Arm(IDEAL, script=IDEAL))
    return arms


@contextmanager
def config_of_arm(arm: Arm, config: EvalConfig, folder: Path) -> Iterator[EvalConfig]:
    """The configuration that evaluates this arm alone. A merged adapter is deleted at the end of the context."""
    arm_config = replace(config, tutors=[])
    if arm.script is not None:
        yield replace(arm_config, teacher_model=ApiModelConfig(SCRIPT + arm.script, vllm=config.teacher_model.vllm))
    elif arm.config is None:
        yield arm_config
    elif arm.config.server_url is not None:
        yield replace(arm_config, server_url=arm.config.server_url, reward_weights=reward_weights(config))
    elif arm.config.adapter is not None:
        with tempfile.TemporaryDirectory(dir=folder, prefix="merged-") as merged:
            merge_adapter(Path(arm.config.adapter), arm.config.model_name_or_path, Path(merged))
            yield replace(arm_config, teacher_model=replace(config.teacher_model, model_name_or_path=merged))
    else:
        yield replace(arm_config, teacher_model=model_of_tutor(arm.config, config.teacher_model))


def summarise_comparison(
    config: EvalConfig,
    measured: Mapping[str, EvaluationResult],
    extra_scores: JudgeScores | None = None,
    readers: MessageReaders | None = None,
) -> dict[str, Any]:
    """The content of metrics.json: `tutors`, and for each sampling the `figures` of each tutor, the `paired`
    differences of each figure, and the student's `fidelity` with each tutor. With `extra_scores` a sampling also holds
    the scores of all `judges`; with `readers` the move classifiers' agreement with people (`readings`).
    `supervised_minus_sampled` holds the change of each tutor's reward with its supervisor, if both samplings were
    played.
    """
    first = next(iter(measured.values())).about
    metrics: dict[str, Any] = {name: first[name] for name in ("seed", "problems", "num_samples_per_problem")}
    metrics["base"] = BASE
    metrics["tutors"] = {name: _about(result.about) for name, result in measured.items()}
    metrics["seconds"] = round(sum(result.about["seconds"] for result in measured.values()), 3)
    for sampling in config.samplings:
        by_tutor, about = _figures(config, sampling, measured, readers)
        metrics[sampling] = {
            "figures": {name: _estimates(figures) for name, figures in by_tutor.items()},
            "paired": paired_figures(by_tutor),
            **about,
            **_judges(config, sampling, measured, extra_scores),
            **_readings(by_tutor, readers),
            "without_verdict": {
                name: counted_share(map(lacks_verdict, result.of(sampling))) for name, result in measured.items()
            },
        }
    changes = {
        name: supervised_difference({sampling: result.of(sampling) for sampling in config.samplings})
        for name, result in measured.items()
    }
    if any(changes.values()):
        metrics[DIFFERENCE] = changes
    return metrics


def _figures(
    config: EvalConfig, sampling: str, measured: Mapping[str, EvaluationResult], readers: MessageReaders | None
) -> tuple[dict[str, ByLesson], dict[str, Any]]:
    """Each tutor's values of all figures, and of language lessons the student's `fidelity` and the `rules_version`."""
    if is_measured_by_solutions(config):
        by_answer = not config.reward_model.is_model
        by_tutor = {}
        for name, result in measured.items():
            records = result.of(sampling)
            maths = maths_by_problem(records, result.initial, result.scores_of(sampling), by_answer)
            by_tutor[name] = judged_by_lesson(records) | maths
        return by_tutor, {"fidelity": {}}
    has_labels = any(result.labels is not None for result in measured.values())
    by_tutor, fidelity = {}, {}
    for name, result in measured.items():
        # The conversations of a tutor on a server have no labels: they enter no figure about errors.
        labels = {} if has_labels and result.labels is None else result.labels
        by_tutor[name], fidelity[name] = figures_by_lesson(
            result.of(sampling), labels, readers, measured_level(config, ())
        )
    return by_tutor, {"fidelity": fidelity, "rules_version": RULES_VERSION}


def _judges(
    config: EvalConfig, sampling: str, measured: Mapping[str, EvaluationResult], extra_scores: JudgeScores | None
) -> dict[str, Any]:
    if not extra_scores:
        return {}
    records = {name: result.of(sampling) for name, result in measured.items()}
    return {"judges": summarise_judges(config.judge_model.model_name_or_path, records, extra_scores)}


def _readings(by_tutor: Mapping[str, ByLesson], readers: MessageReaders | None) -> dict[str, Any]:
    """The move classifiers that took part, and how far to trust them. Their values are in `figures`."""
    if readers is None:
        return {}
    keys = dict.fromkeys(key for figures in by_tutor.values() for key in figures if key.startswith(READ))
    if not keys:
        return {}
    return {"readings": about_readers(readers, [key.removeprefix(READ) for key in keys])}


def _about(about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: about[name] for name in ("tutor", "policy", "engine", "server_url", "seconds", "paid") if name in about
    }


def _estimates(figures: ByLesson) -> dict[str, Any]:
    return {key: mean_with_ci(figures[key]) for key in figures_of([figures])}


def paired_figures(by_tutor: Mapping[str, ByLesson]) -> dict[str, list[dict[str, Any]]]:
    """The differences between every pair of tutors in every figure that at least one of them has."""
    return {
        key: [
            asdict(difference)
            for difference in differences({name: figures.get(key, {}) for name, figures in by_tutor.items()})
        ]
        for key in figures_of(by_tutor.values())
    }
