"""Files that weights are written to, at any place and by several threads: new ones, and ones in shared memory that are
overwritten in place."""

import mmap
import os
from pathlib import Path

import numpy as np


class NewFile:
    """A file that replaces what was at its path."""

    def __init__(self, path: Path):
        self._file = path.open("wb", buffering=0)

    def store(self, offset: int, block: np.ndarray | bytes) -> None:
        """Write `block` at `offset` bytes."""
        _write(self._file.fileno(), offset, block)

    def close(self, size: int) -> None:
        """Close the file, which has `size` bytes."""
        self._file.close()


class KeptFiles:
    """Files in shared memory that are written again and again, and stay mapped meanwhile.

    The kernel fills every page of a new file with zeros before it is written to, and each page of a new mapping costs
    an interruption; both together cost more than the copy. Here the pages are there, and writing is the copy alone.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, np.ndarray] = {}

    def open(self, path: Path) -> "NewFile | _MappedFile":
        """The file at `path`, to be overwritten in place; a new one if there is none, or it is empty."""
        if not path.exists() or not path.stat().st_size:
            return NewFile(path)
        inode = path.stat().st_ino
        if inode not in self._mapped:
            with path.open("r+b") as file:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # all pages at once, not one by one
                self._mapped[inode] = np.frombuffer(mmap.mmap(file.fileno(), 0, flags=flags), np.uint8)
        return _MappedFile(path, self._mapped[inode])

    def forget(self) -> None:
        """Unmap all, so that the memory of removed files is free."""
        self._mapped.clear()


class _MappedFile:
    def __init__(self, path: Path, pages: np.ndarray):
        self._file = path.open("r+b", buffering=0)
        self._pages = pages[: os.fstat(self._file.fileno()).st_size]  # beyond the file's end is no memory

    def store(self, offset: int, block: np.ndarray | bytes) -> None:
        if offset + len(block) <= len(self._pages):
            self._pages[offset : offset + len(block)] = np.frombuffer(block, np.uint8)
        else:
            _write(self._file.fileno(), offset, block)

    def close(self, size: int) -> None:
        if size != os.fstat(self._file.fileno()).st_size:
            self._file.truncate(size)
        self._file.close()


def _write(file: int, offset: int, block: np.ndarray | bytes) -> None:
    rest = memoryview(block)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written
