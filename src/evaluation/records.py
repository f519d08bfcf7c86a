"""An evaluation's conversations as one Parquet file: the columns of the rollout files, and each row's sampling."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from src import rollout_files
from src.api import ConversationRecord
from src.errors import DataError

_SAMPLING = "sampling"


def write_records(path: Path, records: Sequence[tuple[str, ConversationRecord]]) -> None:
    """Write (sampling, record) pairs; `sampling` ("sampled" or "greedy") becomes a column. Whole or not there."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    rollout_files.write_records(unfinished, [record for _, record in records])
    samplings = pa.array([sampling for sampling, _ in records], pa.string())
    pq.write_table(pq.read_table(unfinished).append_column(_SAMPLING, samplings), unfinished)
    unfinished.replace(path)


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
