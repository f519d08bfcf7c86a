"""The problems of an evaluation are those of the run that is measured, and whether it was trained on some of them."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.problem import Problem
from classroom_rl.server.client import ClassroomClient

logger = logging.getLogger(__name__)

_WORLD = "world"
"""The folder in a run folder with the lessons that were made for that run."""
_CONFIGURED = ("config/train_rl.yaml", "config/vllm_server.yaml")
_MADE_FOR_TRAINING = f"{_WORLD}/lessons_train.jsonl"


def load_measured_problems(config: EvalConfig) -> tuple[list[Problem], dict[str, int]]:
    """The problems of an evaluation. Lessons that were made for another run are replaced by those that were made for
    the run that is measured, which is logged.

    Returns:
        The problems, and by run folder how many of them that run was trained on, which is logged, too; runs with none
        are left out.

    Raises:
        DataError: as `load_problems`; or if the runs that are compared have different lessons of their own.
    """
    runs = [run for run in dict.fromkeys(measured_runs(config)) if run.is_dir()]
    sources = [_of_these_runs(source, runs) for source in config.dataset.eval_datasets]
    problems = load_problems(sources, config.dataset.max_val_examples, config.seed)
    trained_on = {str(run): len(_trained_on(run) & {problem.id for problem in problems}) for run in runs}
    trained_on = {run: count for run, count in trained_on.items() if count}
    for run, count in trained_on.items():
        logger.warning("%s", what_was_trained_on(run, count, len(problems)))
    return problems, trained_on


def what_was_trained_on(run: str, count: int, problems: int) -> str:
    """What a figure on these problems means."""
    return (
        f"{count} of the {problems} problems are among those that {run} is trained on: what is measured on them says "
        "nothing about new ones. Name held-out problems in dataset.eval_datasets."
    )


def measured_runs(config: EvalConfig) -> Iterable[Path]:
    """The run folders of the tutors that are measured, as far as they can be told: that of a server, or the one that a
    model's folder is in."""
    for tutor in config.tutors or [config]:
        if tutor.server_url is not None:
            yield from _run_of_server(tutor.server_url)
            continue
        model = tutor if config.tutors else tutor.teacher_model
        names = [getattr(model, "adapter", None), model.model_name_or_path]
        folder = next((Path(name).resolve() for name in names if name and Path(name).is_dir()), None)
        marks = (_MADE_FOR_TRAINING, *_CONFIGURED)
        inside = [] if folder is None else list(folder.parents)[:3]  # as runs/a/checkpoints/checkpoint-8 is
        yield from [run for run in inside if any((run / mark).is_file() for mark in marks)][:1]


def _run_of_server(url: str) -> list[Path]:
    try:
        folder = Path(ClassroomClient(url).health().run_folder)
    except ClassroomError:
        return []  # the evaluation says so when it asks for conversations
    if not folder.is_dir():
        logger.warning(
            "the run folder of the server at %s, %s, is not on this machine: whether it was trained on these problems "
            "cannot be told",
            url,
            folder,
        )
    return [folder]


def _of_these_runs(source: DatasetSource, runs: Sequence[Path]) -> DatasetSource:
    """The source, or in place of lessons that were made for another run the runs' own."""
    path = Path(source.name_or_path)
    if path.parent.name != _WORLD:
        return source
    own = [run / _WORLD / path.name for run in runs if (run / _WORLD / path.name).is_file()]
    if not own or path.resolve() in own:
        return source
    if len({each.read_bytes() for each in own}) > 1:
        raise DataError(
            f"The tutors come from runs with different lessons, {' and '.join(map(str, own))}: what one was trained on "
            "is held out of the other's training. Name lessons that all of them were not trained on in "
            "dataset.eval_datasets, or measure the tutors one by one."
        )
    logger.warning("the lessons are those of the run that is measured, %s, and not %s", own[0], path)
    return replace(source, name_or_path=str(own[0]))


def _trained_on(run: Path) -> set[str]:
    """The ids of the problems in a run's training data, as far as they are in files on this machine."""
    sources, limit, seed, skipped = [DatasetSource(str(run / _MADE_FOR_TRAINING))], -1, None, 0
    recorded = next((run / name for name in _CONFIGURED if (run / name).is_file()), None)
    try:
        if recorded is not None:
            written = yaml.safe_load(recorded.read_text(encoding="utf-8"))
            sources = [
                _here(each, written["logging"]["save_dir"], run) for each in written["dataset"]["train_datasets"]
            ]
            limit, seed = written["dataset"]["max_train_examples"], written["seed"]
            skipped = written["skip_first_samples"]
        files = [source for source in sources if Path(source.name_or_path).is_file()]
        if not files or len(files) < len(sources):
            logger.warning("which problems %s is trained on cannot be told: its data is not on this machine", run)
        return {problem.id for problem in load_problems(files, limit, seed)[skipped:]} if files else set()
    except (ClassroomError, OmegaConfBaseException, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        logger.warning("which problems %s is trained on cannot be told: %s", run, error)
        return set()


def _here(written: dict[str, Any], save_dir: str, run: Path) -> DatasetSource:
    """A recorded source; of a run folder that was moved, where it is now."""
    source = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DatasetSource), written))
    inside = source.name_or_path.removeprefix(f"{save_dir.rstrip('/')}/")
    moved = inside != source.name_or_path and (run / inside).is_file()
    return replace(source, name_or_path=str(run / inside)) if moved else source
