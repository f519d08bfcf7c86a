"""Writes and reads conversations as Parquet files: one table over all steps in `<run folder>/rollouts/`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from src.classroom.record import ConversationRecord
from src.system.storage import storage_errors

ROWS_PER_GROUP = 128
"""Size of a row group: to read one conversation, this many are read."""
_NESTED = ("turns", "verdicts", "solutions", "rewards", "meta")


def write_rollouts(run_folder: Path, step: int, rank: int, records: Sequence[ConversationRecord]) -> Path:
    """Write the conversations that a rank trained on in a step; an earlier file of the step is replaced."""
    folder = run_folder / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}-{rank}.parquet"
    write_records(path, records)
    return path


def drop_rollouts_from(run_folder: Path, step: int) -> None:
    """Remove the files of this step and later ones. A training that resumes there plays these steps again, perhaps
    with another number of processes."""
    for path in (run_folder / "rollouts").glob("step_*.parquet"):
        if int(path.stem.partition("_")[2].partition("-")[0]) >= step:
            path.unlink(missing_ok=True)


def write_records(path: Path, records: Sequence[ConversationRecord]) -> None:
    """Write one row per conversation; nested columns are JSON text. The file is replaced atomically.

    Raises:
        StorageError: if the disk is full or may not be written to.
    """
    rows = []
    for record in records:
        row = record.model_dump(mode="json")
        rows.append({name: json.dumps(value) if name in _NESTED else value for name, value in row.items()})
    unfinished = path.with_suffix(".unfinished")
    with storage_errors(path):
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), unfinished, row_group_size=ROWS_PER_GROUP)
        unfinished.replace(path)


def read_records(path: Path) -> list[ConversationRecord]:
    """Read the conversations of a file of `write_records`."""
    rows = pq.read_table(path, schema=_SCHEMA).to_pylist()
    return [
        ConversationRecord.model_validate(
            {name: json.loads(value) if name in _NESTED else value for name, value in row.items()}
        )
        for row in rows
    ]


@dataclass(frozen=True)
class ConversationReward:
    """The reward of a conversation in a training; None without a verdict."""

    step: int
    problem_id: str
    reward: float | None


def read_rewards(run_folder: Path) -> list[ConversationReward]:
    """Read the rewards of all conversations that a run trained on, without their texts."""
    columns = ["step", "problem_id", "reward"]
    files = sorted((run_folder / "rollouts").glob("step_*.parquet"))
    return [ConversationReward(**row) for path in files for row in pq.read_table(path, columns=columns).to_pylist()]


_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("request_id", pa.string()),
        ("step", pa.int64()),
        ("index", pa.int64()),
        ("problem_id", pa.string()),
        ("problem", pa.string()),
        ("answer", pa.string()),
        ("type", pa.string()),
        ("student_name", pa.string()),
        ("state", pa.string()),
        ("turns", pa.string()),
        ("verdicts", pa.string()),
        ("solutions", pa.string()),
        ("rewards", pa.string()),
        ("reward", pa.float64()),
        ("rejected", pa.bool_()),
        ("failure", pa.string()),
        ("overflow", pa.string()),
        ("max_turns", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("meta", pa.string()),
    ]
)
