"""The journal: an append-only file of everything that happened in a run, one JSON object per line.

A line is handed to the operating system before what it tells of is used, so a killed process loses no event that
anybody acted on. Readers skip a last line that was cut off by a kill.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

JOURNAL_NAME = "journal.jsonl"


class Journal:
    """Appends events to `<run folder>/journal.jsonl` and remembers where each finished conversation stands in it."""

    def __init__(self, run_folder: Path):
        run_folder.mkdir(parents=True, exist_ok=True)
        self.path = run_folder / JOURNAL_NAME
        self._close_cut_line()
        self._file = self.path.open("ab")

    def _close_cut_line(self) -> None:
        """End a line that a kill cut off, so that the next event starts on one of its own."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        with self.path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")

    def append(self, event: str, **fields: Any) -> int:
        """Write one event and return the position of its line in the file, in bytes."""
        position = self._file.tell()
        line = {"event": event, "time": round(time.time(), 3), **fields}
        self._file.write(json.dumps(to_jsonable_python(line), ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        return position

    def read_at(self, position: int) -> dict[str, Any]:
        """The event whose line starts at this position."""
        with self.path.open("rb") as file:
            file.seek(position)
            return json.loads(file.readline())

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a journal in order; lines that a kill cut off are left out."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
