"""Writes and reads the conversations of an evaluation: one Parquet file with the columns of the rollout files, the
sampling, and for maths the initial solutions and the message scores."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Optional

import pyarrow as pa
import pyarrow.parquet as pq

from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import DataError
from classroom_rl.results import rollout_files
from classroom_rl.results.rollout_files import table_of, write_table

CONVERSATIONS_NAME = "conversations.parquet"
"""The file of an evaluation's conversations in its folder."""
_SAMPLING = "sampling"


def write_records(
    path: Path,
    records: Sequence[tuple[str, ConversationRecord]],
    initial: Optional[Mapping[str, Sequence[Solution]]] = None,
    message_scores: Optional[Sequence[Sequence[float]]] = None,
) -> None:
    """Write (sampling, record) pairs. `sampling` ("sampled", "greedy" or "supervised") becomes a column; so do the
    student's solutions before the dialogue, by problem id (`initial_solutions`, as JSON text), and for each record the
    pedagogical reward of each teacher message (`message_scores`). The file is replaced atomically."""
    table = _table_of(records)
    if initial is not None:
        texts = [
            json.dumps([asdict(solution) for solution in initial.get(record.problem_id, [])]) for _, record in records
        ]
        table = table.append_column("initial_solutions", pa.array(texts, pa.string()))
    if message_scores is not None:
        table = table.append_column("message_scores", pa.array(message_scores, pa.list_(pa.float64())))
    write_table(path, table)


def write_compared(
    path: Path, records: Mapping[str, Sequence[tuple[str, ConversationRecord]]], compared: str = "tutor"
) -> None:
    """Write the conversations of several tutors, or students: (sampling, record) pairs by name, with the name in the
    column `compared`. The file is replaced atomically."""
    table = _table_of([pair for pairs in records.values() for pair in pairs])
    names = pa.array([name for name, pairs in records.items() for _ in pairs], pa.string())
    write_table(path, table.append_column(compared, names))


def _table_of(records: Sequence[tuple[str, ConversationRecord]]) -> pa.Table:
    samplings = pa.array([sampling for sampling, _ in records], pa.string())
    return table_of([record for _, record in records]).append_column(_SAMPLING, samplings)


def read_records(path: Path) -> dict[str, list[ConversationRecord]]:
    """Read a file of `write_records`. Returns sampling → its records, in the order of the file. Raises `DataError` if
    there is no such file, or it has no column `sampling`."""
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
    """Return problem id → its records. Problems are in order of appearance."""
    groups: dict[str, list[ConversationRecord]] = {}
    for record in records:
        groups.setdefault(record.problem_id, []).append(record)
    return groups
