"""The rows that lists of conversations show. Each file is read once, without its tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow.parquet as pq

from src.results.rollout_files import plain_record

_COLUMNS = (
    "id step index problem_id problem type student_name state turns verdicts rewards reward rejected failure".split()
)
_PLAYED_BY = ("tutor", "sampling")
LONGEST_TITLE = 110


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """One conversation in a list.

    Attributes:
        personas: the number of student turns of each persona.
        judge_failed: whether a judge attempt brought no verdict.
        failed: whether an error ended the conversation.
        sampling: "sampled" or "greedy" in an evaluation, after the tutor's name if several were compared; else None.
        file, position: its file and its row there; None for a conversation that is only in the journal.
    """

    id: str
    step: int | None
    index: int
    problem_id: str
    title: str
    type: str
    student_name: str | None
    state: str
    messages: int
    personas: dict[str, int]
    rewards: dict[str, float | None]
    reward: float | None
    rejected: bool
    judge_failed: bool
    failed: bool = False
    sampling: str | None = None
    file: Path | None = None
    position: int | None = None


def title_of(problem: str) -> str:
    """A problem in one line: its first lines, cut at `LONGEST_TITLE` characters."""
    line = " · ".join(part.strip() for part in problem[: 4 * LONGEST_TITLE].splitlines() if part.strip())
    return line if len(line) <= LONGEST_TITLE else f"{line[: LONGEST_TITLE - 1]}…"


def row_of(record: dict[str, Any], **more: Any) -> ConversationRow:
    """Make a row from a record as plain data whose nested columns are parsed."""
    personas = Counter(turn["persona"] for turn in record["turns"] if turn["persona"] is not None)
    return ConversationRow(
        title=title_of(record["problem"]),
        messages=len(record["turns"]),
        personas=dict(personas),
        judge_failed=any(each["scores"] is None and each["accepted"] is None for each in record["verdicts"]),
        failed=record.get("failure") is not None,
        **{name: record[name] for name in _COPIED},
        **more,
    )


_COPIED = "id step index problem_id type student_name state rewards reward rejected".split()


class ListIndex:
    """Caches the rows of Parquet files, and their problems. A file is read again only when it has changed."""

    def __init__(self) -> None:
        self._rows: dict[Path, tuple[tuple[int, int], list[ConversationRow]]] = {}
        self._problems: dict[str, str] = {}
        self._lock = Lock()

    def rows(self, files: Sequence[Path]) -> list[ConversationRow]:
        """All rows of these files, in order."""
        return [row for path in files for row in self._rows_of(path)]

    def problem(self, problem_id: str) -> str | None:
        """The text of a problem; None if no file read so far holds it."""
        return self._problems.get(problem_id)

    def _rows_of(self, path: Path) -> list[ConversationRow]:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        with self._lock:
            if path not in self._rows or self._rows[path][0] != stamp:
                self._rows[path] = (stamp, self._read(path))
            return self._rows[path][1]

    def _read(self, path: Path) -> list[ConversationRow]:
        with pq.ParquetFile(path) as file:
            named = [name for name in (*_COLUMNS, *_PLAYED_BY) if name in file.schema_arrow.names]
            rows: list[ConversationRow] = []
            for batch in file.iter_batches(columns=named):
                for record in batch.to_pylist():
                    self._problems[record["problem_id"]] = record["problem"]
                    played_by = ", ".join(record[name] for name in _PLAYED_BY if record.get(name))
                    more = {"sampling": played_by or None, "file": path, "position": len(rows)}
                    rows.append(row_of(plain_record(record), **more))
        return rows
