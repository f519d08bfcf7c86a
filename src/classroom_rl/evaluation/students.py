"""Measures simulated students in six dimensions (`classroom_rl.evaluation.metrics.students`), side by side and beside a
reference. Recorded conversations:

    python -m classroom_rl.evaluation.students RUN other.jsonl --reference mathdial.jsonl

Each name is a run folder or a file, as in `classroom_rl.evaluation.dialogue`. New conversations of several students
with one tutor, on the same lessons and seeds: `python eval.py --config-name students`.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from classroom_rl.config.evaluation import REFERENCE, EvalConfig, StudentConfig
from classroom_rl.config.load import record_run
from classroom_rl.errors import ClassroomError
from classroom_rl.evaluation.dialogue import read_dialogues
from classroom_rl.evaluation.held_out import load_measured_problems, what_was_trained_on
from classroom_rl.evaluation.metrics.students import FIGURES, Talk, differs, measure_students, talk_of, talks_of
from classroom_rl.evaluation.playing import EvaluationResult, play_all
from classroom_rl.evaluation.report.tables import align
from classroom_rl.judges.moves.classifier import require_sklearn
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME, write_compared
from classroom_rl.results.trackers import log_to_wandb
from classroom_rl.rollout.intervals import shown
from classroom_rl.system.keys import print_error
from classroom_rl.system.storage import write_whole

logger = logging.getLogger(__name__)


def students_table(students: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of each student in a column, by dimension; a star marks what clearly differs from the reference. What
    could not be measured stands below with what it needs."""
    reference = students.get(REFERENCE, {"figures": {}})["figures"]
    rows, dimension = [["mean [95 % interval over problems]", *students]], ""
    for name, (figure_dimension, _) in FIGURES.items():
        if figure_dimension != dimension:
            dimension = figure_dimension
            rows.append([f"{figure_dimension}:", *("" for _ in students)])
        cells = []
        for student, measurement in students.items():
            estimate = measurement["figures"].get(name)
            star = " *" if student != REFERENCE and differs(estimate, reference.get(name), name) else ""
            cells.append("not measurable" if estimate is None else shown(estimate, digits=2) + star)
        rows.append([f"  {name}", *cells])
    lines = [
        f"{name}: {counts['conversations']} conversations, {counts['messages']} messages, {counts['problems']} problems"
        for name, counts in students.items()
    ]
    notes = ["* clearly another value than the reference's"] if reference else []
    for name in FIGURES:
        lacking = [student for student, measurement in students.items() if name in measurement["needs"]]
        if lacking:
            needs = students[lacking[0]]["needs"][name]
            notes.append(f"not measurable here: {name} ({', '.join(lacking)}) needs {needs}")
    return "\n".join([*lines, "", align(rows), "", *notes])


def read_reference_talks(path: Path | None) -> list[Talk] | None:
    """The conversations of a reference's file; None without one. Raises `ConfigError` without scikit-learn."""
    if path is None:
        return None
    require_sklearn()
    return [talk for dialogues in read_dialogues(path) for talk in talks_of(dialogues)]


def measure_all(students: Mapping[str, Sequence[Talk]], reference: Sequence[Talk] | None) -> dict[str, dict[str, Any]]:
    """Name → the figures of each student, and of the reference."""
    measured = {name: measure_students(talks, reference) for name, talks in students.items()}
    return measured if reference is None else measured | {REFERENCE: measure_students(reference, reference)}


# Playing -------------------------------------------------------------------------------------------------------------


def config_of_student(student: StudentConfig, config: EvalConfig) -> EvalConfig:
    """The configuration that plays with this student alone."""
    personas = student.student_personas_prompts_paths or config.generation.student_personas_prompts_paths
    generation = replace(config.generation, student_personas_prompts_paths=personas)
    model = student.model(config.student_model)
    return replace(config, students=[], reference=None, student_model=model, generation=generation)


def compare_students(config: EvalConfig) -> dict[str, Any]:
    """Play `teacher_model` with each of `students`, one after the other, and write `metrics.json` and
    `conversations.parquet` into `logging.save_dir`. Returns the content of metrics.json: for each sampling the figures
    of each student and of the reference. Raises what `play_all` does, and `DataError` for an unreadable reference."""
    reference = read_reference_talks(None if config.reference is None else Path(config.reference))
    problems, trained_on = load_measured_problems(config)
    folder = record_run(config, "eval")
    results: dict[str, EvaluationResult] = {}
    for student in config.students:
        logger.info("playing with the student %s", student.name)
        student_folder = folder / "students" / student.name
        student_folder.mkdir(parents=True, exist_ok=True)
        results[student.name] = asyncio.run(play_all(config_of_student(student, config), problems, student_folder))
    write_compared(folder / CONVERSATIONS_NAME, {name: result.records for name, result in results.items()}, "student")
    metrics: dict[str, Any] = {
        "students": {name: result.about for name, result in results.items()},
        "seed": config.seed,
        "problems": len(problems),
        "seconds": round(sum(result.about["seconds"] for result in results.values()), 3),
    }
    for sampling in config.samplings:
        talks = {
            name: [
                talk_of(record, result.labels, result.initial)
                for played_sampling, record in result.records
                if played_sampling == sampling
            ]
            for name, result in results.items()
        }
        metrics[sampling] = measure_all(talks, reference)
        print(f"{sampling}:\n{students_table(metrics[sampling])}\n")
    metrics |= {"problems_trained_on": trained_on} if trained_on else {}
    write_whole(folder / "metrics.json", json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    print(f"{folder / 'metrics.json'}\n{folder / CONVERSATIONS_NAME}")
    for run, count in trained_on.items():
        print(f"warning: {what_was_trained_on(run, count, len(problems))}")
    log_to_wandb(config, metrics, folder)
    return metrics


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file, or a run folder")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="conversations of the students to talk like")
    options = parser.parse_args(arguments)
    try:
        students = {dialogues.name: talks_of(dialogues) for path in options.files for dialogues in read_dialogues(path)}
        print(students_table(measure_all(students, read_reference_talks(options.reference))))
    except (ClassroomError, OSError) as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
