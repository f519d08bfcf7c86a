"""Finds the events of a request in a file of the journal, without keeping the position of every event in memory.

A file is divided into blocks of whole lines. The index lists the blocks that hold events of each request. Each block of
a sealed segment is compressed separately, so that it can be read without the others; together, the blocks form one gzip
file. The index of a segment is written into a file next to it, and rebuilt from the segment if that file is lost.
"""

import gzip
import shutil
from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ValidationError

from classroom_rl.errors import StorageError
from classroom_rl.rollout.store.journal_segments import Segment, refuse_damage
from classroom_rl.system.storage import flush, storage_errors, write_whole

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
        """The lines of a block.

        Raises:
            StorageError: if the segment was deleted or damaged.
        """
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
        complete: the compressed one is flushed to the disk before the plain one is deleted.

        Raises:
            StorageError: if the disk is full; the segment then stays as it was.
        """
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
    """Restore the plain file of a compressed segment.

    Raises:
        StorageError: if the compressed file is damaged, or the disk is full.
    """
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
