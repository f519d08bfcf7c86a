"""Loads the problems of an evaluation: those of the run that is measured. Counts the ones it was trained on."""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.evaluation import EvalConfig, reward_weights, without_zeros
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.problem import Problem
from classroom_rl.server.client import ClassroomClient

logger = logging.getLogger(__name__)

_WORLD = "world"
"""The subfolder of a run folder with the lessons that were generated for that run."""
_CONFIGURED = ("config/train_rl.yaml", "config/vllm_server.yaml")
_MADE_FOR_TRAINING = f"{_WORLD}/lessons_train.jsonl"


def load_measured_problems(config: EvalConfig) -> tuple[list[Problem], dict[str, int]]:
    """Load the problems of an evaluation. Lessons that were generated for another run are replaced by those of the run
    that is measured, with a warning.

    Returns:
        The problems, and for each run folder how many of them that run was trained on, also with a warning. Runs that
        were trained on none are left out.

    Raises:
        ClassroomError: what a server answered that did not say where its lessons are.
        DataError: as `load_problems`; or if the runs that are compared have different generated lessons.
    """
    failures: list[ClassroomError] = []
    runs = [run for run in dict.fromkeys(measured_runs(config, failures)) if run.is_dir()]
    sources = [_lessons_of_runs(source, runs) for source in config.dataset.eval_datasets]
    try:
        problems = load_problems(sources, config.dataset.max_val_examples, config.seed)
    except DataError:
        if failures:  # the lessons may be missing only because the server did not say where its run folder is
            raise failures[0] from None
        raise
    trained_on = {str(run): len(_training_problems(run) & {problem.id for problem in problems}) for run in runs}
    trained_on = {run: count for run, count in trained_on.items() if count}
    for run, count in trained_on.items():
        logger.warning("%s", what_was_trained_on(run, count, len(problems)))
    if config.server_url is None:
        _warn_about_other_rewards(config, runs)
    return problems, trained_on


def _warn_about_other_rewards(config: EvalConfig, runs: Sequence[Path]) -> None:
    """Warn about runs that were trained on another sum of rewards than the one that is measured."""
    measured_weights, implied_weights = reward_weights(config), reward_weights(replace(config, reward_weights=None))
    for run in runs:
        try:
            recorded = _recorded_config(run)
            trained_weights = recorded and (recorded["train"]["reward_weights"] or implied_weights)
        except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
            logger.warning("which rewards %s is trained on cannot be told: %s", run, error)
            continue
        if trained_weights and without_zeros(trained_weights) != without_zeros(measured_weights):
            logger.warning(
                "%s was trained on the rewards %s, but %s are measured: reward_weights='%s' measures what it was "
                "trained on",
                *(run, trained_weights, dict(measured_weights), json.dumps(trained_weights).replace('"', "")),
            )


def what_was_trained_on(run: str, count: int, problems: int) -> str:
    """A warning that a run was trained on `count` of the evaluation's problems."""
    return (
        f"{count} of the {problems} problems are among those that {run} is trained on: what is measured on them says "
        "nothing about new ones. Name held-out problems in dataset.eval_datasets."
    )


def measured_runs(config: EvalConfig, failures: list[ClassroomError]) -> Iterable[Path]:
    """The run folders of the tutors that are measured, as far as they are known: that of a server, or the one that
    contains a model's folder. The error of a server that does not answer, or refuses to, is added to `failures`."""
    for tutor in config.tutors or [config]:
        if tutor.server_url is not None:
            yield from _run_of_server(tutor.server_url, failures)
            continue
        model = tutor if config.tutors else tutor.teacher_model
        names = [getattr(model, "adapter", None), model.model_name_or_path]
        folder = next((Path(name).resolve() for name in names if name and Path(name).is_dir()), None)
        markers = (_MADE_FOR_TRAINING, *_CONFIGURED)
        # The run folder is a few levels up, as runs/a is for runs/a/checkpoints/checkpoint-8.
        candidates = [] if folder is None else list(folder.parents)[:3]
        yield from [run for run in candidates if any((run / marker).is_file() for marker in markers)][:1]


def _run_of_server(url: str, failures: list[ClassroomError]) -> list[Path]:
    try:
        folder = Path(ClassroomClient(url).health().run_folder)
    except ClassroomError as error:
        failures.append(error)
        return []  # the evaluation waits for a server that still starts, and reports one that stays away
    if not folder.is_dir():
        logger.warning(
            "the run folder of the server at %s, %s, is not on this machine: whether it was trained on these problems "
            "cannot be told",
            url,
            folder,
        )
    return [folder]


def _lessons_of_runs(source: DatasetSource, runs: Sequence[Path]) -> DatasetSource:
    """The source itself; for lessons that were generated for another run, the file of the same name in `runs`."""
    path = Path(source.name_or_path)
    if path.parent.name != _WORLD:
        return source
    candidates = [run / _WORLD / path.name for run in runs if (run / _WORLD / path.name).is_file()]
    if not candidates or path.resolve() in candidates:
        return source
    if len({candidate.read_bytes() for candidate in candidates}) > 1:
        raise DataError(
            f"The tutors come from runs with different lessons, {' and '.join(map(str, candidates))}: what one was "
            "trained on is held out of the other's training. Name lessons that all of them were not trained on in "
            "dataset.eval_datasets, or measure the tutors one by one."
        )
    logger.warning("the lessons are those of the run that is measured, %s, and not %s", candidates[0], path)
    return replace(source, name_or_path=str(candidates[0]))


def _training_problems(run: Path) -> set[str]:
    """The ids of the problems that a run was trained on, from the data files that exist on this machine."""
    sources, limit, seed, skipped = [DatasetSource(str(run / _MADE_FOR_TRAINING))], -1, None, 0
    try:
        if run_config := _recorded_config(run):
            sources = [
                _moved_source(recorded, run_config["logging"]["save_dir"], run)
                for recorded in run_config["dataset"]["train_datasets"]
            ]
            limit, seed = run_config["dataset"]["max_train_examples"], run_config["seed"]
            skipped = run_config["skip_first_samples"]
        files = [source for source in sources if Path(source.name_or_path).is_file()]
        if not files or len(files) < len(sources):
            logger.warning("which problems %s is trained on cannot be told: its data is not on this machine", run)
        return {problem.id for problem in load_problems(files, limit, seed)[skipped:]} if files else set()
    except (ClassroomError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        logger.warning("which problems %s is trained on cannot be told: %s", run, error)
        return set()


def _recorded_config(run: Path) -> Any:
    """The configuration that a run recorded; None if it recorded none. Raises `yaml.YAMLError` if it is damaged."""
    path = next((run / name for name in _CONFIGURED if (run / name).is_file()), None)
    return None if path is None else yaml.safe_load(path.read_text(encoding="utf-8"))


def _moved_source(recorded: dict[str, Any], save_dir: str, run: Path) -> DatasetSource:
    """A source as the run recorded it. If the run folder was moved, a path inside it follows."""
    source = DatasetSource(**recorded)
    relative = source.name_or_path.removeprefix(f"{save_dir.rstrip('/')}/")
    is_moved = relative != source.name_or_path and (run / relative).is_file()
    return replace(source, name_or_path=str(run / relative)) if is_moved else source
