"""Writes and reads conversations as Parquet files. Together, the files in `<run folder>/rollouts/` are one table over
all steps.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Optional, TypeVar, get_args

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.system.storage import storage_errors

R = TypeVar("R", bound=Trajectory)
ROWS_PER_GROUP = 128
"""The number of rows in a row group: to read one conversation, a whole group is read."""
_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_LISTS = {list[int]: pa.list_(pa.int32()), list[float]: pa.list_(pa.float32())}


def _arrow_type(annotation: Any) -> pa.DataType:
    """Return the column type of a field. Nested values are stored as JSON text."""
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    plain = arguments[0] if type(None) in get_args(annotation) and len(arguments) == 1 else annotation
    return _TYPES.get(plain) or _LISTS.get(plain) or pa.string()


def columns_of(record: type[Trajectory]) -> pa.Schema:
    """Return the Parquet columns of a record: its fields."""
    return pa.schema([(name, _arrow_type(field_info.annotation)) for name, field_info in record.model_fields.items()])


def columns_of_dataclass(row: type) -> pa.Schema:
    """Return the Parquet columns of a dataclass: its fields."""
    return pa.schema([(field.name, _arrow_type(field.type)) for field in fields(row)])


def nested_columns(record: type[Trajectory]) -> list[str]:
    """Return the names of the columns that hold JSON text."""
    plain = (str, Optional[str], str | None)
    return [
        name
        for name, field_info in record.model_fields.items()
        if _arrow_type(field_info.annotation) == pa.string() and field_info.annotation not in plain
    ]


def write_rollouts(run_folder: Path, step: int, rank: int, records: Sequence[Trajectory], attempt: int = 0) -> Path:
    """Write the conversations that a rank played in a step. An earlier file of the same step and attempt is replaced.
    The attempt is 0 for the batch; more for further problems, played to replace groups without variance."""
    folder = run_folder / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"step_{step:06d}-{rank}-{attempt}.parquet" if attempt else f"step_{step:06d}-{rank}.parquet")
    write_records(path, records)
    return path


def files_by_step(run_folder: Path) -> list[list[Path]]:
    """Return the files of each step, in order."""
    files = sorted((run_folder / "rollouts").glob("step_*.parquet"))
    return [list(paths) for _, paths in groupby(files, key=lambda path: path.stem.partition("-")[0])]


def drop_rollouts_from(run_folder: Path, step: int) -> None:
    """Remove the files of this step and of later ones, also those that a kill left unfinished. A training that resumes
    there plays these steps again, perhaps with another number of processes."""
    for path in (run_folder / "rollouts").glob("step_*"):
        if int(path.stem.partition("_")[2].partition("-")[0]) >= step:
            path.unlink(missing_ok=True)


def table_of(records: Sequence[Trajectory]) -> pa.Table:
    """Make a table with one row per episode and the columns of its record; nested values become JSON text."""
    kind = type(records[0]) if records else ConversationRecord
    nested = nested_columns(kind)
    rows = [record.model_dump(mode="json") for record in records]
    rows = [row | {name: json.dumps(row[name]) for name in nested} for row in rows]
    return pa.Table.from_pylist(rows, schema=columns_of(kind))


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file. An existing one is replaced atomically. Raises `StorageError` if the disk is full or may
    not be written to."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with storage_errors(path):
        pq.write_table(table, unfinished, row_group_size=ROWS_PER_GROUP)
        unfinished.replace(path)


def write_records(path: Path, records: Sequence[Trajectory]) -> None:
    """Write one row per episode. Raises as `write_table` does."""
    write_table(path, table_of(records))


def read_records(path: Path, kind: type[R] = ConversationRecord) -> list[R]:
    """Read a file of `write_records` as records of this class. Fields without a column, because an older version wrote
    the file, have their defaults."""
    nested, stored = nested_columns(kind), set(pq.read_schema(path).names)
    rows = pq.read_table(path, schema=columns_of(kind)).to_pylist()
    rows = [{name: value for name, value in row.items() if name in stored} for row in rows]
    return [
        kind.model_validate({name: json.loads(value) if name in nested else value for name, value in row.items()})
        for row in rows
    ]


_NESTED = frozenset(nested_columns(ConversationRecord))
OPTIONAL = {
    name: item.get_default(call_default_factory=True)
    for name, item in ConversationRecord.model_fields.items()
    if not item.is_required()
}
"""Fields that a record may lack, with their values in an empty conversation."""


def plain_record(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of a file to plain data for the page, with its nested columns parsed. Fields that the row lacks,
    because it belongs to another environment or an older version, are as in an empty conversation."""
    return OPTIONAL | {name: from_json(value) if name in _NESTED else value for name, value in row.items()}


@dataclass(frozen=True)
class ConversationReward:
    """The reward of a conversation in a training; None without a verdict."""

    step: int
    problem_id: str
    reward: float | None


def read_rewards(run_folder: Path) -> list[ConversationReward]:
    """Read the rewards of all conversations of a training, without their texts."""
    columns = ["step", "problem_id", "reward"]
    files = sum(files_by_step(run_folder), [])
    return [ConversationReward(**row) for path in files for row in pq.read_table(path, columns=columns).to_pylist()]
