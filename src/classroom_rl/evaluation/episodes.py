"""Measures the episodes of any environment: a server's policy plays held-out problems, without a supervisor and with
fixed seeds, and two policies are compared on the same problems.

    MEASURE="python -m classroom_rl.evaluation.episodes --environment my_game http://127.0.0.1:8005"
    $MEASURE heldout.jsonl before.parquet --untrained
    $MEASURE heldout.jsonl after.parquet --before before.parquet

Tutors in the classroom are measured by eval.py, which knows more about conversations. With `--before`, the comparison
is also written as summary.json into the server's run folder, where it decides whether the policy learned.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from pydantic import ValidationError

from classroom_rl.config.base import DatasetSource, EnvironmentConfig
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.learning import describe_learning, write_learning
from classroom_rl.results.rollout_files import read_records, write_records
from classroom_rl.results.run_folder import METRICS_NAME
from classroom_rl.results.statistics import paired_change
from classroom_rl.rollout.datasets import load_problems, load_rows
from classroom_rl.rollout.environment import ENVIRONMENTS, module_of
from classroom_rl.rollout.intervals import Estimate, mean_with_ci, shown
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.keys import print_error

Record = TypeVar("Record", bound=Trajectory)
Figures = dict[str, dict[str, list[float]]]
"""Figure → problem → its value in each episode."""
SUMMARY = "summary.json"
SEED = 2024


def measure(
    client: ClassroomClient,
    problems: Sequence[Problem],
    episodes: int,
    path: Path,
    record: type[Record],
    name: str = "",
    untrained: bool = False,
) -> list[Record]:
    """Play each problem `episodes` times with the server's current policy, and write the episodes into a Parquet file.
    If the file already holds these episodes of this policy, it is read instead.

    Args:
        record: the environment's class of records.
        name: a part of the request's id; episodes under another name are played again.
        untrained: measure the policy before any training.

    Raises:
        DataError: if the file lacks the episodes of the untrained policy, and the server has a trained one.
        ClassroomError: as `ClassroomClient.sample`.
    """
    policy = PolicyVersion() if untrained else client.health().policy
    request = SampleRequest(
        problems=[problem.text for problem in problems] * episodes,
        answers=[problem.answer for problem in problems] * episodes,
        request_id=f"measured-{name}",
        seed=SEED,
        step=0,
        run_id=policy.run_id,
        policy_version=policy.version,
        fixed_seeds=True,
    )
    # The digest covers the whole request: a file with this id holds the answer to exactly this request.
    request = request.model_copy(update={"request_id": f"measured-{request.digest[:16]}"})
    if path.is_file():
        records = read_records(path, record)
        if {episode.request_id for episode in records} == {request.request_id}:
            return records
    if untrained and client.health().policy != policy:
        raise DataError(
            f"{path} does not hold the episodes of the untrained model, and the server has {client.health().policy} "
            "already: take another folder (logging.save_dir) to measure before and after."
        )
    records = client.sample(request).conversations
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(path, records)
    return records


def figures_of(records: Sequence[Trajectory]) -> Figures:
    """The figures of episodes (`Trajectory.figures`), by problem. Each turn reward adds its mean over the episode's
    messages, named as in metrics.jsonl, where the episode counts."""
    figures: Figures = defaultdict(lambda: defaultdict(list))
    for record in records:
        for name, value in record.figures.items():
            figures[name][record.problem_id].append(value)
        for name, values in record.turn_rewards.items():
            scores = [value for value in values if value is not None]
            if scores and record.figures:
                figures[f"turn_rewards/{name}/mean"][record.problem_id].append(fmean(scores))
    return {name: dict(by_problem) for name, by_problem in figures.items()}


def compared(before: Figures, after: Figures) -> dict[str, dict[str, Estimate]]:
    """Figure → its mean before and after, and the mean change on the same problems, each with a 95 % interval over
    problems."""
    return {
        name: {
            "before": mean_with_ci(before[name]),
            "after": mean_with_ci(after[name]),
            "change": paired_change(before[name], after[name]),
        }
        for name in after
        if name in before
    }


def table(figures: Mapping[str, Mapping[str, Estimate]], labels: Mapping[str, str]) -> str:
    """The comparison as text; `labels` says what a figure is called, where not by its name
    (`Trajectory.figure_labels`)."""
    lines = [f"{'':52}{'before':>8}{'after':>8}   change [95 % interval over problems]"]
    for name, estimates in figures.items():
        before, after, change = (estimates[key] for key in ("before", "after", "change"))
        if change["mean"] is None:
            continue
        values = f"{before['mean']:8.3f}{after['mean']:8.3f}   {shown(change, '+')}"
        lines.append(f"{labels.get(name, name):52}{values}")
    return "\n".join(lines)


def write_comparison(
    before: Sequence[Trajectory], after: Sequence[Trajectory], version: int, labels: Mapping[str, str], folder: Path
) -> str:
    """Write summary.json into a run folder and, if it is that of a training, learning.json. `version` is the policy
    version that played `after`. Returns the comparison, and whether a training's policy learned, as text."""
    figures = compared(figures_of(before), figures_of(after))
    (folder / SUMMARY).write_text(json.dumps({"version": version, **figures}, indent=2) + "\n", encoding="utf-8")
    learned = describe_learning(write_learning(folder)) if (folder / METRICS_NAME).is_file() else ""
    return f"{table(figures, labels)}\n\n{learned}".rstrip()


def held_out(path: Path) -> list[Problem]:
    """The problems of a file with the column `problem` and, if they have answers, `answer`. Raises `DataError` as
    `load_problems`."""
    source = DatasetSource(str(path))
    answers = source.answer_column if source.answer_column in load_rows(source).column_names else None
    return load_problems([replace(source, answer_column=answers)])


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the address of a running server")
    parser.add_argument("problems", type=Path, help="a JSONL file of problems, with the column problem")
    parser.add_argument("episodes", type=Path, help="the Parquet file to write")
    parser.add_argument("--environment", required=True, help=f"{', '.join(ENVIRONMENTS)}, or the name of a package")
    parser.add_argument("--per-problem", type=int, default=2, help="the episodes on each problem")
    parser.add_argument("--name", default="", help="a part of the request's id: letters, digits and -")
    parser.add_argument("--untrained", action="store_true", help="the policy is the one before any training")
    parser.add_argument("--before", type=Path, help="the Parquet file of another policy, to compare with")
    arguments = parser.parse_args()
    try:
        record = module_of(arguments.environment, "environment").Environment.Record
        client = ClassroomClient(arguments.url, record=record)
        problems, before = held_out(arguments.problems), []
        if arguments.before is not None:
            if not arguments.before.is_file():
                raise DataError(
                    f"--before names {arguments.before}, which is no file: play it first, without --before."
                )
            before = read_records(arguments.before, record)
        client.wait_until_up(EnvironmentConfig.server_start_timeout_s)
        records = measure(
            client, problems, arguments.per_problem, arguments.episodes, record, arguments.name, arguments.untrained
        )
        if arguments.before is not None:
            health = client.health()
            folder = Path(health.run_folder)
            print(write_comparison(before, records, health.policy.version, record.figure_labels, folder))
            return 0
    except (ClassroomError, OSError, ValidationError) as error:
        print_error(error)
        return 2
    for name, by_problem in figures_of(records).items():
        print(f"{record.figure_labels.get(name, name):52}{shown(mean_with_ci(by_problem))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
