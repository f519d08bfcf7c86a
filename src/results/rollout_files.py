"""Conversations as Parquet files: one table over all steps under `<run folder>/rollouts/`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from src.classroom.record import ConversationRecord
from src.system.storage import storage_errors

ROWS_PER_GROUP = 128
"""Rows of a file that are stored together: to read one conversation is to read so many."""
_NESTED = ("turns", "verdicts", "solutions", "rewards", "meta")


def write_rollouts(run_folder: Path, step: int, rank: int, records: Sequence[ConversationRecord]) -> Path:
    """Write the conversations that a rank trained on in a step; a step written before is replaced."""
    folder = run_folder / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}-{rank}.parquet"
    write_records(path, records)
    return path


def drop_rollouts_from(run_folder: Path, step: int) -> None:
    """Remove the files of this step and of later ones: a training that begins there plays them again, with as many
    processes as it has now."""
    for path in (run_folder / "rollouts").glob("step_*.parquet"):
        if int(path.stem.partition("_")[2].partition("-")[0]) >= step:
            path.unlink(missing_ok=True)


def write_records(path: Path, records: Sequence[ConversationRecord]) -> None:
    """One row per conversation; nested columns are JSON text. Whole or not there.

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
    """The conversations of a file written by `write_records`."""
    rows = pq.read_table(path, schema=_SCHEMA).to_pylist()
    return [
        ConversationRecord.model_validate(
            {name: json.loads(value) if name in _NESTED else value for name, value in row.items()}
        )
        for row in rows
    ]


@dataclass(frozen=True)
class ConversationReward:
    """What came of a conversation in a batch; `reward` is None for one without a verdict."""

    step: int
    problem_id: str
    reward: float | None


def read_rewards(run_folder: Path) -> list[ConversationReward]:
    """What came of every conversation that a run trained on, without reading what was said."""
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
