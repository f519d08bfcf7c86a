"""The journal: an append-only file of everything that happened in a run, one JSON object per line.

Each line is written to the operating system before its content is used, so a killed process loses no event that had an
effect. Readers skip a last line that a kill cut off.

The events, and the field that says what each is about:

    weights       policy        the teacher's weights were loaded: their folder and fingerprint
    batch         request       a request began: its problems, its body, and the weights
    draft         conversation  a message of a supervised teacher, before its review
    review        conversation  the review of a draft that the teacher has to write again
    turn          conversation  a message with its review, and the tokens that it added to the teacher's context; with a
                                mask of its tokens if tools were called
    verdict       conversation  one judge attempt
    solutions     conversation  the student's solutions after the dialogue
    grades        conversation  the grade of each solution
    cut_short     conversation  the student's context is full, which ended the dialogue
    failure       conversation  the conversation cannot go on, because a model refused or a context is full
    rewards       conversation  all rewards
    conversation  conversation  the conversation finished: its record, without the tokens, which its turns hold
    judge_check   request       the result of a check of the judge; no conversation and no reward depends on it
"""

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from ..errors import StorageError
from ..system.storage import storage_errors

JOURNAL_NAME = "journal.jsonl"
_HEAD = re.compile(rb'\{"event": "(\w+)", "time": ([\d.e+]+), "\w+": "([^"]*)"')
_HEAD_LENGTH = 400  # bytes; ids have at most 200 characters


class Journal:
    """Appends events to `<run folder>/journal.jsonl`, and finds the events of each conversation, including those that
    earlier servers wrote."""

    def __init__(self, run_folder: Path):
        self.path = run_folder / JOURNAL_NAME
        self._positions: dict[str, dict[str, list[int]]] = defaultdict(dict)
        self._begun: dict[str, int] = {}
        self._weights: int | None = None
        self._file: FileIO | None = None
        with storage_errors(self.path):
            run_folder.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            self._read_heads()
            self._file = self.path.open("ab", buffering=0)

    def append(self, event: str, **fields: Any) -> int:
        """Write one event, and return the position of its line in bytes.

        Args:
            fields: the event's fields; the first one says what the event is about.

        Raises:
            StorageError: if the disk is full, or the file was deleted or replaced; nothing is written then.
        """
        self._refuse_another_file()
        position = self._file.tell()
        line = {"event": event, "time": round(time.time(), 3), **fields}
        data = json.dumps(to_jsonable_python(line), ensure_ascii=False).encode()
        with storage_errors(self.path):
            self._write(data + b"\n", position)
        self._note(data[:_HEAD_LENGTH], position)
        return position

    def _write(self, line: bytes, position: int) -> None:
        """Write a whole line or, on a full disk, nothing: the next line would be appended to a partial one."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(position)
            self._file.seek(position)
            raise

    def read_at(self, position: int) -> dict[str, Any]:
        """The event whose line starts at this position.

        Raises:
            StorageError: if the file was deleted or replaced.
        """
        self._refuse_another_file()
        with self.path.open("rb") as file:
            file.seek(position)
            return json.loads(file.readline())

    def _refuse_another_file(self) -> None:
        """Raise if the path is no longer the open file: lines written to a deleted file are lost, and the known
        positions are wrong in another file."""
        if self._file is None or self._file.closed:  # not open yet, or closed already
            return
        own = os.fstat(self._file.fileno())
        try:
            found = self.path.stat()
        except FileNotFoundError:
            what = "was deleted or moved away"
        else:
            if os.path.samestat(own, found) and found.st_size == self._file.tell():
                return
            what = "was replaced or changed by another program"
        raise StorageError(
            f"The journal {self.path} {what} while this server uses it, so nothing more can be written down, or looked "
            "up in it. End the server. If you have the file or a copy, put it back; then start the server again with "
            "the same command: without the file it plays the current batch anew and knows no conversation of before, "
            "but replies that were paid for are in the *_calls.sqlite beside it and are not asked for again."
        )

    def begun(self, request_id: str) -> dict[str, Any] | None:
        """The last `batch` event of this request; None if there is none."""
        return self.read_at(self._begun[request_id]) if request_id in self._begun else None

    def loaded_weights(self) -> dict[str, Any] | None:
        """The last `weights` event; None if there is none."""
        return None if self._weights is None else self.read_at(self._weights)

    def events(self, conversation_id: str) -> list[dict[str, Any]]:
        """The events of a conversation so far, in order."""
        positions = self._positions.get(request_of(conversation_id), {}).get(conversation_id, [])
        return [self.read_at(position) for position in positions]

    def close(self) -> None:
        self._file.close()

    def _read_heads(self) -> None:
        """Index every event in the file, and drop a last line that a kill cut off: it had no effect yet."""
        position = 0
        with self.path.open("rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(position)
                    return
                self._note(line[:_HEAD_LENGTH], position)
                position += len(line)

    def _note(self, head: bytes, position: int) -> None:
        found = head_of(head)
        if found is None:
            return
        event, _, subject = found
        if event == "weights":
            self._weights = position
        elif event == "batch":
            self._note_batch(subject, position)
        else:
            self._positions[request_of(subject)].setdefault(subject, []).append(position)

    def _note_batch(self, request_id: str, position: int) -> None:
        """Index a `batch` event. If its weights or body differ from before, forget the events of the earlier try."""
        before, now = self.begun(request_id), self.read_at(position)
        if before is not None and any(before[name] != now[name] for name in ("weights", "body")):
            self._positions.pop(request_id, None)
        self._begun[request_id] = position


def head_of(line: bytes) -> tuple[str, float, str] | None:
    """The event of a journal line, its time in seconds since 1970, and what it is about, without parsing the rest of
    the line; None if the line has another form."""
    found = _HEAD.match(line)
    return None if found is None else (found[1].decode(), float(found[2]), found[3].decode())


def conversation_id(request_id: str, index: int) -> str:
    """The id of a request's conversation at this position."""
    return f"{request_id}-{index:04d}"


def request_of(conversation_id: str) -> str:
    """The request that a conversation belongs to."""
    return conversation_id.rpartition("-")[0]


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a journal in order, without an incomplete last line."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
