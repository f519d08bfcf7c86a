"""The journal: an append-only record of everything that happened in a run, one JSON object per line.

Each line is written to the operating system before its content is used, so a killed process loses no event that had an
effect. Readers skip a last line that is incomplete because of a kill. The lines are in `journal.jsonl`; once that file
is large, it becomes a segment, which is compressed in the background (journal_segments.py), and a new file begins.

The events, and the field that names the subject of each:

    weights       policy        the policy's weights were loaded: their folder and fingerprint, and those before
    batch         request       a request began: its problems, its body, and the weights
    draft         conversation  a message of a supervised policy, before its review
    review        conversation  the review of a draft that the policy has to write again
    turn          conversation  a message with its review, and the tokens that it added to the policy's context; with a
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
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO, FileIO
from pathlib import Path
from threading import Lock, Thread
from typing import Any, BinaryIO

from pydantic_core import to_jsonable_python

from classroom_rl.errors import StorageError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.store.journal_segments import (
    UNFINISHED,
    IndexedFile,
    JournalIndex,
    JournalStream,
    Segment,
    decompress,
    read_index,
    segments_folder,
    segments_of,
)
from classroom_rl.system.storage import storage_errors

logger = logging.getLogger(__name__)

JOURNAL_NAME = "journal.jsonl"
SEGMENT_BYTES = 64 * 1024**2
BLOCK_BYTES = 128 * 1024
_REQUESTS_IN_MEMORY = 8
_HEAD = re.compile(rb'\{"event": "(\w+)", "time": ([\d.e+]+), "\w+": "([^"]*)"')
HEAD_LENGTH = 400
"""The number of bytes of a line that `head_of` reads; ids have at most 200 characters."""


class Journal:
    """Appends events to `<run folder>/journal.jsonl`, and finds the events of each conversation, including those that
    earlier servers wrote. Only the positions of the last requests' events are held in memory; others are found through
    an index.

    Attributes:
        on_event: called with each event once it is written, with its fields as they were given; None: nobody listens.

    Args:
        segment_bytes: the size at which `journal.jsonl` becomes a segment.
        block_bytes: the size of the blocks, each of which is compressed and searched separately.

    Raises:
        StorageError: if a file cannot be opened, or a segment is missing or damaged.
    """

    def __init__(self, run_folder: Path, segment_bytes: int = SEGMENT_BYTES, block_bytes: int = BLOCK_BYTES):
        self.path = run_folder / JOURNAL_NAME
        self._segment_bytes, self._block_bytes = segment_bytes, block_bytes
        self.on_event: Callable[[Mapping[str, Any]], None] | None = None
        # Of the last requests: request → conversation → positions of its events.
        self._positions: OrderedDict[str, dict[str, list[int]]] = OrderedDict()
        self._files: list[IndexedFile] = []  # the sealed segments in order, then the growing file
        self._file: FileIO | None = None
        self._compressing, self._threads = Lock(), []
        with storage_errors(self.path):
            run_folder.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            for segment in segments_of(self.path):
                self._open_segment(segment)
            self._open_growing()
            self._file = self.path.open("ab", buffering=0)
        self._compress_segments()

    @property
    def end(self) -> int:
        """The position of the next line: the number of bytes of all lines so far."""
        return self._files[-1].end

    def append(self, event: str, **fields: Any) -> int:
        """Write one event, and return the position of its line in bytes.

        Args:
            fields: the event's fields; the first one names its subject (see the table of events).

        Raises:
            StorageError: if the disk is full, or the file was deleted or replaced; then nothing is written.
        """
        self._refuse_another_file()
        line = {"event": event, "time": round(time.time(), 3), **fields}
        data = json.dumps(to_jsonable_python(line), ensure_ascii=False).encode() + b"\n"
        with storage_errors(self.path):
            if self.end - self._files[-1].start >= self._segment_bytes:
                self._seal()
            self._write(data)
        if self.on_event is not None:
            self.on_event(line)
        return self._note(data)

    def _write(self, line: bytes) -> None:
        """Write a whole line or, on a full disk, nothing: otherwise the next line would continue a partial one."""
        position, rest = self._file.tell(), memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(position)
            self._file.seek(position)
            raise

    def read_at(self, position: int) -> dict[str, Any]:
        """Read the event whose line starts at this position. Raises a `StorageError` if the file was deleted or
        replaced."""
        self._refuse_another_file()
        return json.loads(next(file for file in reversed(self._files) if file.start <= position).line(position))

    def _refuse_another_file(self) -> None:
        """Raise if the path no longer names the open file: lines that are written to a deleted file are lost, and in
        another file the known positions are wrong."""
        if self._file is None or self._file.closed:  # not open yet, or closed already
            return
        open_file = os.fstat(self._file.fileno())
        try:
            current = self.path.stat()
        except FileNotFoundError:
            change = "was deleted or moved away"
        else:
            if os.path.samestat(open_file, current) and current.st_size == self._file.tell():
                return
            change = "was replaced or changed by another program"
        raise StorageError(
            f"The journal {self.path} {change} while this server uses it, so nothing more can be written down, or "
            "looked up in it. End the server. If you have the file or a copy, put it back; then start the server again "
            "with the same command: without the file it plays the current batch anew and knows no conversation of "
            "before, but replies that were paid for are in the *_calls.sqlite beside it and are not asked for again."
        )

    def begun(self, request_id: str) -> dict[str, Any] | None:
        """The last `batch` event of this request; None if there is none."""
        return self._read_last(file.index.begun.get(request_id) for file in reversed(self._files))

    def loaded_weights(self) -> dict[str, Any] | None:
        """The last `weights` event; None if there is none."""
        return self._read_last(file.index.weights for file in reversed(self._files))

    def _read_last(self, positions: Iterable[int | None]) -> dict[str, Any] | None:
        """The event at the first position that is not None; None if all are."""
        position = next((position for position in positions if position is not None), None)
        return None if position is None else self.read_at(position)

    def earlier_weights(self) -> tuple[PolicyVersion, str] | None:
        """The policy that was loaded before the last one, and the fingerprint of its weights; None if there is none."""
        event = self.loaded_weights()
        previous = event and event.get("before")  # missing in journals of earlier versions of this program
        return (PolicyVersion(**previous["version"]), previous["weights"]) if previous else None

    def write_weights(self, policy: PolicyVersion, weights: str, path: Path) -> None:
        """Append a `weights` event."""
        last = self.loaded_weights()
        previous = last and {"version": last["version"], "weights": last["weights"]}
        # The same weights again: those before them stay the same, too.
        if last and (PolicyVersion(**last["version"]), last["weights"]) == (policy, weights):
            previous = last.get("before")
        self.append("weights", policy=str(policy), version=policy, weights=weights, path=str(path), before=previous)

    def events(self, conversation_id: str) -> list[dict[str, Any]]:
        """The events of a conversation so far, in order."""
        positions = self._positions_of(request_of(conversation_id)).get(conversation_id, [])
        return [self.read_at(position) for position in positions]

    def close(self) -> None:
        """Close the file, and wait until segments are compressed."""
        self._file.close()
        for thread in self._threads:
            thread.join()

    # Segments --------------------------------------------------------------------------------------------------------

    def _open_segment(self, segment: Segment) -> None:
        """Add a segment. A compression that a kill interrupted is completed or undone."""
        for path in segment.folder.glob(f"{UNFINISHED}*"):
            path.unlink()
        index = read_index(segment)
        self._files.append(IndexedFile.sealed(segment, index or JournalIndex()))
        if index is not None:
            self._positions.clear()  # re-indexing an earlier segment cached positions, which lack this segment's
            segment.plain.unlink(missing_ok=True)
            return
        if not segment.plain.exists():
            decompress(segment)
        with segment.open() as file:
            self._read_heads(file)

    def _open_growing(self) -> None:
        """Add `journal.jsonl`, and truncate a last line that is incomplete because of a kill: it had no effect yet."""
        start = self._files[-1].end if self._files else 0
        self._files.append(IndexedFile(self.path, start, start, JournalIndex()))
        with self.path.open("rb+") as file:
            self._read_heads(file)
            file.truncate(self.end - start)

    def _seal(self) -> None:
        """Make `journal.jsonl` a segment, and begin a new file. If that fails, everything stays as it was."""
        sealed = self._files[-1]
        segment = Segment(sealed.start, sealed.end, segments_folder(self.path))
        segment.folder.mkdir(exist_ok=True)
        self.path.rename(segment.plain)
        try:
            new_file = self.path.open("xb", buffering=0)
        except OSError:
            segment.plain.rename(self.path)
            raise
        self._file.close()
        self._file = new_file
        sealed.path, sealed.segment = segment.plain, segment
        self._files.append(IndexedFile(self.path, sealed.end, sealed.end, JournalIndex()))
        self._compress_segments()

    def _compress_segments(self) -> None:
        """Compress, in a thread, the segments that are not compressed yet."""
        files = [file for file in self._files[:-1] if not file.index.offsets]
        if not files:
            return

        def compress() -> None:
            with self._compressing:
                for file in files:
                    try:
                        if not file.index.offsets:
                            file.compress()
                    except StorageError as error:
                        logger.warning("a part of the journal stays uncompressed for now: %s", error)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(Thread(target=compress, name="journal", daemon=True))
        self._threads[-1].start()

    # Index -----------------------------------------------------------------------------------------------------------

    def _read_heads(self, file: BinaryIO) -> None:
        """Index the complete lines of the last file."""
        self._files[-1].end = self._files[-1].start
        for line in file:
            if line.endswith(b"\n"):
                self._note(line)

    def _note(self, line: bytes) -> int:
        """Index a line that was added to the last file, and return its position."""
        file = self._files[-1]
        position = file.end
        file.end += len(line)
        file.index.add_line(position, self._block_bytes)
        head = head_of(line[:HEAD_LENGTH])
        if head is None:
            return position
        event, _, subject = head
        if event == "weights":
            file.index.weights = position
        elif event == "batch":
            self._note_batch(subject, position)
        else:
            request = request_of(subject)
            file.index.note(request)
            if request in self._positions:
                self._positions[request].setdefault(subject, []).append(position)
        return position

    def _note_batch(self, request_id: str, position: int) -> None:
        """Index a `batch` event. If its weights or body differ from those before, forget the earlier try's events."""
        previous, positions = self.begun(request_id), self._positions_of(request_id)
        if previous is not None and begins_anew(previous, self.read_at(position)):
            positions.clear()
        self._files[-1].index.begun[request_id] = position
        self._files[-1].index.note(request_id)

    def _positions_of(self, request_id: str) -> dict[str, list[int]]:
        """The positions of the events of a request's conversations."""
        if request_id not in self._positions:
            self._positions[request_id] = self._search(request_id)
            while len(self._positions) > _REQUESTS_IN_MEMORY:
                self._positions.popitem(last=False)
        self._positions.move_to_end(request_id)
        return self._positions[request_id]

    def _search(self, request_id: str) -> dict[str, list[int]]:
        """Find the events of a request's conversations in the blocks that hold any."""
        positions: dict[str, list[int]] = {}
        previous = None
        for position, line in self._lines_about(request_id):
            event, _, subject = head_of(line[:HEAD_LENGTH]) or ("", 0.0, "")
            if event == "batch" and subject == request_id:
                batch = json.loads(line)
                if previous is not None and begins_anew(previous, batch):
                    positions.clear()
                previous = batch
            elif event not in ("", "batch", "weights") and request_of(subject) == request_id:
                positions.setdefault(subject, []).append(position)
        return positions

    def _lines_about(self, request_id: str) -> Iterator[tuple[int, bytes]]:
        """The positions and lines of the blocks that hold events about a request."""
        for file in self._files:
            for number in file.index.requests.get(request_id, ()):
                position = file.index.blocks[number]
                for line in BytesIO(file.block(number)):
                    yield position, line
                    position += len(line)


def begins_anew(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a later `batch` event of a request asks for other work than an earlier one."""
    return any(before[name] != now[name] for name in ("weights", "body"))


def head_of(line: bytes) -> tuple[str, float, str] | None:
    """The event of a journal line, its time in seconds since 1970, and its subject, without parsing the rest of the
    line; None if the line has another form."""
    match = _HEAD.match(line)
    return None if match is None else (match[1].decode(), float(match[2]), match[3].decode())


def conversation_id(request_id: str, index: int) -> str:
    """The id of the conversation with this index in a request."""
    return f"{request_id}-{index:04d}"


def request_of(conversation_id: str) -> str:
    """The request that a conversation belongs to."""
    return conversation_id.rpartition("-")[0]


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a journal in order, without an incomplete last line. Raises as `JournalStream` does, and a
    `StorageError` if a part is damaged."""
    with JournalStream(path) as stream:
        for position, line in stream.lines():
            try:
                event = json.loads(line)
            except ValueError as error:  # a damaged segment may be noticed only at its end
                raise _damaged(path, position, error) from error
            yield event


def _damaged(path: Path, position: int, error: ValueError) -> StorageError:
    """The error of a line that cannot be parsed; it names the file."""
    for segment in segments_of(path):
        if segment.start <= position < segment.end:
            path = segment.compressed
    return StorageError(
        f"{path} is damaged: the line at byte {position} of the journal is no JSON ({error}). Put the file back from a "
        "copy."
    )
