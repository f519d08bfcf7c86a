"""Writes a safetensors file tensor by tensor. The library's own `save_file` wants all of a file's tensors at once, and
copies each of them twice on the way."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES

_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_HEADER_BYTES = 1 << 20
_MOST_ENTRIES_BYTES = _HEADER_BYTES - 1024


class SafetensorsWriter:
    """A file that is being written; its header, for which room is left in front, comes last.

    Attributes:
        names: the tensors so far.
        bytes: the size of their data.
    """

    def __init__(self, path: Path):
        self.names: list[str] = []
        self.bytes = 0
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._entries_bytes = 0
        self._file = path.open("wb", buffering=0)
        self._file.seek(8 + _HEADER_BYTES)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, which is on the CPU."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        end = self.bytes + data.nbytes
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [self.bytes, end]}
        self._entries[name] = entry
        self._entries_bytes += len(json.dumps({name: entry})) + 2
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.names.append(name)
        self.bytes = end

    def has_room_for(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor with a name of ordinary length can follow: the header has room for it, and it begins where
        its type has to."""
        return self._entries_bytes <= _MOST_ENTRIES_BYTES and self.bytes % tensor.element_size() == 0

    def close(self) -> None:
        """Write the header, and close the file."""
        header = json.dumps(self._entries).encode()
        if len(header) > _HEADER_BYTES:
            raise ValueError(f"The header of {self._file.name} has {len(header)} bytes; there is room for less.")
        self._file.seek(0)
        self._file.write(_HEADER_BYTES.to_bytes(8, "little") + header.ljust(_HEADER_BYTES))
        self._file.close()
