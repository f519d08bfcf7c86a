"""The files of a journal, which together are one stream of lines:

    journal.jsonl                          the growing file: the end of the stream; events are appended to it
    journal/<start>-<end>.jsonl.gz         a sealed segment: the bytes `start` to `end` of the stream, compressed
    journal/<start>-<end>.index.json       the index of that segment's events
    journal/<start>-<end>.jsonl            the segment itself, until it is compressed

When the growing file has become large, it is renamed to a segment, and a new one begins. So a small journal is one
plain file, as in earlier versions. Segments never change. A position is a number of bytes from the beginning of the
stream; it stays the same when a segment is sealed or compressed.

The index finds the events of a request without keeping the position of every event in memory. A file is divided into
blocks of whole lines, and its index lists the blocks that hold events of each request. Each block of a sealed segment
is compressed separately, so that it can be read without the others; together, the blocks form one gzip file. The index
of a segment is written into a file next to it, and rebuilt from the segment if that file is lost.
"""

import errno
import gzip
import math
import os
import re
import shutil
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Self

from pydantic import BaseModel, ValidationError

from classroom_rl.errors import StorageError
from classroom_rl.system.storage import flush, storage_errors, write_whole

_FOLDER = "journal"
_NAME = re.compile(r"(\d+)-(\d+)\.jsonl(\.gz)?")


@dataclass(frozen=True, order=True)
class Segment:
    """A sealed segment: the bytes from `start` to `end` of the stream. It is complete in `plain`, in `compressed`, or
    in both; `plain` is deleted once `compressed` is complete."""

    start: int
    end: int
    folder: Path

    @property
    def plain(self) -> Path:
        return self._file("jsonl")

    @property
    def compressed(self) -> Path:
        return self._file("jsonl.gz")

    @property
    def index(self) -> Path:
        return self._file("index.json")

    def _file(self, suffix: str) -> Path:
        return self.folder / f"{self.start:012d}-{self.end:012d}.{suffix}"

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The segment's lines as a file. Raises a `StorageError` if the segment was deleted or damaged."""
        with refuse_damage(self), ExitStack() as files:
            try:
                file = files.enter_context(self.plain.open("rb"))
            except FileNotFoundError:  # it is deleted only after the compressed file is complete
                file = files.enter_context(gzip.open(self.compressed, "rb"))
            yield file


def segments_folder(path: Path) -> Path:
    """The folder of the segments of the journal at this path."""
    return path.parent / _FOLDER


@contextmanager
def refuse_damage(segment: Segment) -> Iterator[None]:
    """Turn the errors that a missing or damaged compressed segment causes in the `with` block into a `StorageError`."""
    try:
        yield
    except (FileNotFoundError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise StorageError(
            f"{segment.compressed}, a part of the journal, is missing or damaged ({error}). Put it back from a copy. "
            f"If there is none, move the folder {segment.folder} away: the server then does not know the conversations "
            "in it, and plays anew what it has to continue."
        ) from error


def segments_of(path: Path) -> list[Segment]:
    """The sealed segments of the journal at this path, in order. Raises a `StorageError` if one of them is missing, or
    they belong to different journals."""
    return _without_gaps(_listed(segments_folder(path)))


def _without_gaps(segments: list[Segment]) -> list[Segment]:
    for first, second in pairwise(segments):
        if first.end != second.start:
            raise StorageError(
                f"{first.folder} holds the journal's segments {first.plain.stem} and {second.plain.stem}, but the "
                "first does not end where the second starts. Put the missing file back from a copy, or move files of "
                "another journal away."
            )
    return segments


def _listed(folder: Path) -> list[Segment]:
    if not folder.is_dir():
        return []
    names = [_NAME.fullmatch(path.name) for path in folder.iterdir()]
    return sorted({Segment(int(name[1]), int(name[2]), folder) for name in names if name is not None})


class JournalStream:
    """Reads a journal's lines, also while a server appends to it and seals segments. It covers the files that existed
    when it was opened.

    Attributes:
        begin, end: the first position of the stream, and the position after its end, at that time.

    Raises:
        FileNotFoundError: if there is no journal.
        StorageError: if a segment is missing.
    """

    def __init__(self, path: Path):
        previous: list[Segment] | None = None
        self._growing: BinaryIO | None = None
        # Until the segments are the same before and after the growing file is opened: none was sealed in between.
        while (segments := _listed(segments_folder(path))) != previous:
            previous = segments
            self.close()
            self._growing = _open_if_exists(path)
        self._segments = _without_gaps(segments)
        if self._growing is None and not self._segments:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._growing_start = self._segments[-1].end if self._segments else 0
        self.begin = self._segments[0].start if self._segments else 0
        self.end = self._growing_start + (self._growing.seek(0, os.SEEK_END) if self._growing is not None else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._growing is not None:
            self._growing.close()

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yields the position and the content of each line from `start` on, without an incomplete last line. If `start`
        is inside a line, the rest of that line comes first."""
        for begin, opening in self._files(start):
            with opening as file:
                position = max(begin, start)
                file.seek(position - begin)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    yield position, line
                    position += len(line)

    def lines_at(self, positions: Sequence[int]) -> Iterator[bytes]:
        """Yields the lines that start at these positions, in ascending order."""
        remaining = deque(sorted(positions))
        for begin, opening in self._files(remaining[0] if remaining else self.end):
            end = next((segment.end for segment in self._segments if segment.start == begin), math.inf)
            with opening as file:
                while remaining and remaining[0] < end:
                    file.seek(remaining.popleft() - begin)
                    yield file.readline()

    def _files(self, start: int) -> Iterator[tuple[int, AbstractContextManager[BinaryIO]]]:
        """The files from the one that contains `start` on, each with its first position. They open when entered."""
        for segment in self._segments:
            if segment.end > start:
                yield segment.start, segment.open()
        if self._growing is not None:
            yield self._growing_start, nullcontext(self._growing)


def _open_if_exists(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


# The index of a segment ----------------------------------------------------------------------------------------------


_LEVEL = 6  # higher ones take twice the time, for files that are 4 % smaller
_BLOCKS_IN_MEMORY = 64
UNFINISHED = "unfinished-"


class JournalIndex(BaseModel):
    """The positions of the events in one file of the journal.

    Attributes:
        blocks: the position of each block's first line, in bytes of the stream.
        requests: by request, the numbers of the blocks with events about it or its conversations.
        begun: by request, the position of its last `batch` event.
        weights: the position of the last `weights` event; None if there is none.
        offsets: the offset of each block in the compressed file, in bytes, then that file's size; empty if the file is
            not compressed.
    """

    blocks: list[int] = []
    requests: dict[str, list[int]] = {}
    begun: dict[str, int] = {}
    weights: int | None = None
    offsets: list[int] = []

    def add_line(self, position: int, block_bytes: int) -> None:
        """Add a line to the last block, or begin a new block if the last one has `block_bytes` already."""
        if not self.blocks or position - self.blocks[-1] >= block_bytes:
            self.blocks.append(position)

    def note(self, request: str) -> None:
        """Note that the last block holds an event of this request."""
        numbers, last = self.requests.setdefault(request, []), len(self.blocks) - 1
        if not numbers or numbers[-1] != last:
            numbers.append(last)


class IndexedFile:
    """One file with the bytes from `start` to `end` of the stream, and its index.

    Attributes:
        segment: None for the growing file, whose `end` moves.
    """

    def __init__(self, path: Path, start: int, end: int, index: JournalIndex, segment: Segment | None = None):
        self.path, self.start, self.end, self.index, self.segment = path, start, end, index, segment

    @classmethod
    def sealed(cls, segment: Segment, index: JournalIndex) -> "IndexedFile":
        return cls(segment.plain, segment.start, segment.end, index, segment)

    def line(self, position: int) -> bytes:
        """The line that starts at this position; raises the errors of `block`."""
        plain = self._open_plain()
        if plain is not None:
            with plain:
                plain.seek(position - self.start)
                return plain.readline()
        number = bisect_right(self.index.blocks, position) - 1
        block, start = self.block(number), position - self.index.blocks[number]
        return block[start : block.index(b"\n", start) + 1]

    def block(self, number: int) -> bytes:
        """The lines of a block. Raises a `StorageError` if the segment was deleted or damaged."""
        start, end = [*self.index.blocks[number : number + 2], self.end][:2]
        plain = self._open_plain()
        if plain is not None:
            with plain:
                plain.seek(start - self.start)
                return plain.read(end - start)
        with refuse_damage(self.segment):
            content = _decompressed(self.segment.compressed, *self.index.offsets[number : number + 2])
            if len(content) != end - start:
                raise EOFError(f"the lines at {start} should have {end - start} bytes")
            return content

    def _open_plain(self) -> BinaryIO | None:
        """Open the uncompressed file; None if it was compressed."""
        try:
            return None if self.index.offsets else self.path.open("rb")
        except FileNotFoundError:
            if self.index.offsets:  # a thread compressed it just now
                return None
            if self.segment is None:
                raise
            with refuse_damage(self.segment):
                raise

    def compress(self) -> None:
        """Compress a sealed segment. Whenever the process is killed, either the plain or the compressed file is
        complete: the compressed one is flushed to the disk before the plain one is deleted. Raises a `StorageError` if
        the disk is full; the segment then stays as it was."""
        segment, offsets = self.segment, [0]
        unfinished = segment.folder / f"{UNFINISHED}{segment.compressed.name}"
        with storage_errors(segment.compressed):
            try:
                with segment.plain.open("rb") as source, unfinished.open("wb") as target:
                    for start, end in pairwise([*self.index.blocks, self.end]):
                        target.write(gzip.compress(source.read(end - start), _LEVEL, mtime=0))
                        offsets.append(target.tell())
                index = self.index.model_copy(update={"offsets": offsets})
                flush(unfinished)
                write_whole(segment.index, index.model_dump_json())
                unfinished.replace(segment.compressed)
                flush(segment.folder)
            except (OSError, StorageError):
                unfinished.unlink(missing_ok=True)
                raise
            self.index = index
            segment.plain.unlink()


def read_index(segment: Segment) -> JournalIndex | None:
    """The stored index of a compressed segment; None if it is missing, damaged, or of another file."""
    try:
        index = JournalIndex.model_validate_json(segment.index.read_bytes())
        fits = index.offsets[-1] == segment.compressed.stat().st_size and index.blocks[0] == segment.start
    except (FileNotFoundError, ValidationError, IndexError):
        return None
    return index if fits else None


def decompress(segment: Segment) -> None:
    """Restore the plain file of a compressed segment. Raises a `StorageError` if the compressed file is damaged, or the
    disk is full."""
    unfinished = segment.folder / f"{UNFINISHED}{segment.plain.name}"
    with storage_errors(segment.plain), segment.open() as source, unfinished.open("wb") as target:
        shutil.copyfileobj(source, target)
        if target.tell() != segment.end - segment.start:
            with refuse_damage(segment):
                raise EOFError(f"{target.tell()} bytes")
    unfinished.replace(segment.plain)


@lru_cache(_BLOCKS_IN_MEMORY)
def _decompressed(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return gzip.decompress(file.read(end - start))
