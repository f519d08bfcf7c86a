"""An evaluation's conversations as one Parquet file: the columns of the rollout files, each row's sampling, and what an
evaluation of maths has besides."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Optional

import pyarrow as pa
import pyarrow.parquet as pq

from src.classroom.conversation import Solution
from src.classroom.record import ConversationRecord
from src.errors import DataError
from src.results import rollout_files
from src.results.rollout_files import table_of, write_table

_SAMPLING = "sampling"


def write_records(
    path: Path,
    records: Sequence[tuple[str, ConversationRecord]],
    initial: Optional[Mapping[str, Sequence[Solution]]] = None,
    message_scores: Optional[Sequence[Sequence[float]]] = None,
) -> None:
    """Write (sampling, record) pairs; `sampling` ("sampled" or "greedy") becomes a column. Whole or not there.

    Args:
        initial: the student's solutions before the dialogue, by problem id: JSON text in the column
            `initial_solutions`.
        message_scores: the pedagogical reward of each teacher message of each record: the column `message_scores`.
    """
    table = _table_of(records)
    if initial is not None:
        texts = [json.dumps([asdict(each) for each in initial.get(record.problem_id, [])]) for _, record in records]
        table = table.append_column("initial_solutions", pa.array(texts, pa.string()))
    if message_scores is not None:
        table = table.append_column("message_scores", pa.array(message_scores, pa.list_(pa.float64())))
    write_table(path, table)


def write_compared(path: Path, records: Mapping[str, Sequence[tuple[str, ConversationRecord]]]) -> None:
    """Write the conversations of several tutors, (sampling, record) pairs by tutor, with a column `tutor`. Whole or not
    there."""
    table = _table_of([pair for pairs in records.values() for pair in pairs])
    tutors = pa.array([name for name, pairs in records.items() for _ in pairs], pa.string())
    write_table(path, table.append_column("tutor", tutors))


def _table_of(records: Sequence[tuple[str, ConversationRecord]]) -> pa.Table:
    samplings = pa.array([sampling for sampling, _ in records], pa.string())
    return table_of([record for _, record in records]).append_column(_SAMPLING, samplings)


def read_records(path: Path) -> dict[str, list[ConversationRecord]]:
    """The records of a file that `write_records` wrote, by sampling, in the order of the file.

    Raises:
        DataError: if there is no such file, or it does not say of which sampling its rows are.
    """
    if not path.is_file():
        raise DataError(f"There is no file {path}. eval.py writes it.")
    if _SAMPLING not in pq.read_schema(path).names:
        raise DataError(f"{path} has no column {_SAMPLING}: it was not written by eval.py.")
    samplings = pq.read_table(path, columns=[_SAMPLING])[_SAMPLING].to_pylist()
    by_sampling: dict[str, list[ConversationRecord]] = {}
    for sampling, record in zip(samplings, rollout_files.read_records(path), strict=True):
        by_sampling.setdefault(sampling, []).append(record)
    return by_sampling


def group_by_problem(records: Sequence[ConversationRecord]) -> dict[str, list[ConversationRecord]]:
    """The records of each problem, problems in order of appearance."""
    groups: dict[str, list[ConversationRecord]] = {}
    for record in records:
        groups.setdefault(record.problem_id, []).append(record)
    return groups
