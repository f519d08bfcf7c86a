"""Files that weights are written to, at any place and by several threads, and safetensors files that are written tensor
by tensor and hashed on the way.
"""

import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import _TYPES

from classroom_rl.models.policy_folder import CONTENT_DIGEST


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


_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_HEADER_BYTES = 1 << 20
_MOST_ENTRIES_BYTES = _HEADER_BYTES - 1024
_BLOCK_BYTES = 1 << 18
_MOST_THREADS = 8


class SafetensorsWriter:
    """A file that is being written; its header, for which room is left in front, comes last. The header's metadata has
    a digest of names, types, shapes and values, taken block by block while a block is in the processor's cache.

    Args:
        kept: overwrites a file in shared memory in place, if one is there.

    Attributes:
        names: the tensors so far.
        bytes: the size of their data.
    """

    def __init__(self, path: Path, kept: KeptFiles | None = None):
        self.names: list[str] = []
        self.bytes = 0
        self._entries: dict[str, Any] = {}
        self._entries_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._path = path
        self._threads = min(torch.get_num_threads(), _MOST_THREADS)
        self._pool = ThreadPoolExecutor(self._threads)
        self._file = NewFile(path) if kept is None else kept.open(path)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, which is on the CPU."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        end = self.bytes + data.nbytes
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [self.bytes, end]}
        self._entries[name] = entry
        self._entries_bytes += len(json.dumps({name: entry})) + 2
        self._store(data)
        self.names.append(name)
        self.bytes = end

    def has_room_for(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor with a name of ordinary length can follow: the header has room for it, and it begins where
        its type has to."""
        return self._entries_bytes <= _MOST_ENTRIES_BYTES and self.bytes % tensor.element_size() == 0

    def close(self) -> None:
        """Write the header, and close the file."""
        self._pool.shutdown()
        self._digest.update(json.dumps(self._entries).encode())
        metadata = {"format": "pt", CONTENT_DIGEST: self._digest.hexdigest()}
        header = json.dumps({"__metadata__": metadata, **self._entries}).encode()
        if len(header) > _HEADER_BYTES:
            raise ValueError(f"The header of {self._path} has {len(header)} bytes; there is room for less.")
        self._file.store(0, _HEADER_BYTES.to_bytes(8, "little") + header.ljust(_HEADER_BYTES))
        self._file.close(8 + _HEADER_BYTES + self.bytes)

    def _store(self, data: np.ndarray) -> None:
        """Write `data` behind what is there. Each thread takes some of the blocks, which lie beside each other."""
        blocks = range(0, len(data), _BLOCK_BYTES)
        per_thread = -(-len(blocks) // self._threads) or 1
        shares = [blocks[first : first + per_thread] for first in range(0, len(blocks), per_thread)]
        offset = 8 + _HEADER_BYTES + self.bytes
        futures = [self._pool.submit(self._store_blocks, data, share, offset) for share in shares[1:]]
        for each in shares[:1]:
            self._digest.update(self._store_blocks(data, each, offset))
        for each in futures:
            self._digest.update(each.result())

    def _store_blocks(self, data: np.ndarray, blocks: range, offset: int) -> bytes:
        """Write some blocks, and return their digests one after the other."""
        digests = []
        for start in blocks:
            block = data[start : start + _BLOCK_BYTES]
            digests.append(xxhash.xxh3_128_digest(block))
            self._file.store(offset + start, block)
        return b"".join(digests)
