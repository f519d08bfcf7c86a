"""How weights go from the trainer to the workers of engines: in buffers that one process broadcasts to all others, with
a fingerprint at the end. Both sides use this module; only a GPU's side needs vLLM.

Sender and receivers cut the same list of tensors into the same buffers. The last broadcast is the sender's fingerprint:
a receiver that computed another one from what it got refuses the weights.
"""

import base64
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from math import prod
from typing import Protocol

import torch
import xxhash

from classroom_rl.models.weight_transfer import TensorInfo

_ALIGNMENT = 8  # bytes: a tensor of any type may begin there
_FINGERPRINT_BYTES = 16


class Group(Protocol):
    """A group of processes: that of gloo below, or vLLM's `PyNcclCommunicator`."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> None: ...

    def destroy(self) -> None: ...


class GlooGroup:
    """A group of processes on CPUs, apart from those of `torch.distributed`. It is complete once all have joined.
    `timeout_s` says how long one broadcast, or the waiting for the others, may take."""

    def __init__(self, store: torch.distributed.Store, rank: int, world_size: int, timeout_s: float):
        timeout = timedelta(seconds=timeout_s)
        self._store = store  # the main process's store serves the others'
        self._group: torch.distributed.ProcessGroupGloo | None = torch.distributed.ProcessGroupGloo(
            store, rank, world_size, timeout
        )

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send a tensor from the process of rank `src` to all others, into tensors of that size. Raises a
        `RuntimeError` if another process is gone, or this one left."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        if (group := self._group) is None:
            raise RuntimeError("the group was left")
        work = group.broadcast([tensor], options)
        del group  # so that another thread may leave it meanwhile
        work.wait()

    def destroy(self) -> None:
        """Close the connections: whoever waits for this process notices."""
        self._group = None  # its destructor closes them; its `abort` leaves them open


@dataclass(frozen=True)
class Buffer:
    """Some tensors, and the byte at which each begins in their buffer."""

    tensors: Sequence[TensorInfo]
    starts: Sequence[int]
    size: int


def buffers_of(tensors: Iterable[TensorInfo], most_bytes: int) -> Iterator[Buffer]:
    """Divide tensors, in their order, into buffers of at most `most_bytes`; a larger tensor gets one of its own."""
    buffer_tensors: list[TensorInfo] = []
    starts: list[int] = []
    size = 0
    for tensor in tensors:
        start = -(-size // _ALIGNMENT) * _ALIGNMENT
        if buffer_tensors and start + size_of(tensor) > most_bytes:
            yield Buffer(buffer_tensors, starts, size)
            buffer_tensors, starts, start = [], [], 0
        buffer_tensors.append(tensor)
        starts.append(start)
        size = start + size_of(tensor)
    if buffer_tensors:
        yield Buffer(buffer_tensors, starts, size)


def size_of(tensor: TensorInfo) -> int:
    """The size of a tensor in bytes."""
    return prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize


def packed(
    pieces: Iterable[Mapping[str, torch.Tensor]], tensors: Sequence[TensorInfo], most_bytes: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Yields the buffers to send.

    Args:
        pieces: the tensors by name, in the order of `tensors`; each piece needs to be valid only until the next is
            asked for.

    Raises:
        ValueError: if they are other tensors than `tensors` says: receivers would take bytes of one for another's.
    """
    named_tensors = (item for piece in pieces for item in piece.items())
    for plan in buffers_of(tensors, most_bytes):
        buffer, end = torch.empty(plan.size, dtype=torch.uint8, device=device), 0
        for info, start in zip(plan.tensors, plan.starts, strict=True):
            name, tensor = next(named_tensors, ("nothing", buffer))
            if (name, tensor.dtype, list(tensor.shape)) != (info.name, getattr(torch, info.dtype), info.shape):
                raise ValueError(f"{info} was announced, and {name} came: {tensor.dtype}, {list(tensor.shape)}.")
            buffer[end:start] = 0  # what lies between two tensors counts in the fingerprint
            end = start + size_of(info)
            buffer[start:end] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            if tensor.is_cuda:  # else the piece may be gone before it is copied
                torch.cuda.current_stream(device).synchronize()
        yield buffer
    if (surplus := next(named_tensors, None)) is not None:
        raise ValueError(f"{surplus[0]} came, which was not announced.")


def send(buffers: Iterable[torch.Tensor], tensors: Sequence[TensorInfo], group: Group, device: torch.device) -> str:
    """Broadcast the buffers from rank 0, then their fingerprint, which is returned."""
    fingerprint = Fingerprint(tensors)
    for buffer in buffers:
        fingerprint.update(buffer)
        group.broadcast(buffer, src=0)
        if buffer.is_cuda:  # a broadcast is only enqueued there, and the buffer must outlive it
            torch.cuda.current_stream(device).synchronize()
    digest = fingerprint.digest()
    group.broadcast(torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device), src=0)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return digest.hex()


class Receiver:
    """One version of the weights on its way in: iterating over it receives the tensors.

    Args:
        most_bytes: as the sender's.
    """

    def __init__(self, tensors: Sequence[TensorInfo], most_bytes: int, group: Group, device: torch.device):
        self._tensors, self._most_bytes, self._group, self._device = tensors, most_bytes, group, device
        self._fingerprint = Fingerprint(tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for plan in buffers_of(self._tensors, self._most_bytes):
            buffer = torch.empty(plan.size, dtype=torch.uint8, device=self._device)
            self._group.broadcast(buffer, src=0)
            self._fingerprint.update(buffer)
            for tensor, start in zip(plan.tensors, plan.starts, strict=True):
                flat = buffer[start : start + size_of(tensor)].view(getattr(torch, tensor.dtype))
                yield tensor.name, flat.view(tensor.shape)

    def check(self) -> str:
        """Compare the fingerprint of what was received with the sender's, and return it. Raises a `RuntimeError` if
        they differ."""
        sent = torch.empty(_FINGERPRINT_BYTES, dtype=torch.uint8, device=self._device)
        self._group.broadcast(sent, src=0)
        expected, digest = bytes(sent.tolist()), self._fingerprint.digest()
        if digest != expected:
            raise RuntimeError(f"the trainer sent weights {expected.hex()}, and {digest.hex()} arrived")
        return digest.hex()


class Fingerprint:
    """A hash of names, types, shapes and bytes. Equal weights that are sent in equal buffers have equal ones."""

    def __init__(self, tensors: Sequence[TensorInfo]):
        self._hash = xxhash.xxh3_128(json.dumps([asdict(tensor) for tensor in tensors]).encode())
        self._checksums: list[torch.Tensor] = []

    def update(self, buffer: torch.Tensor) -> None:
        """Add a buffer."""
        if buffer.is_cuda:
            self._checksums.append(checksum(buffer))
        else:
            self._hash.update(xxhash.xxh3_128_digest(buffer.numpy()))

    def digest(self) -> bytes:
        """The hash of all buffers so far."""
        for value in self._checksums:
            self._hash.update(value.cpu().numpy())
        self._checksums.clear()
        return self._hash.digest()


_BLOCK_WORDS = 1 << 20
_FACTOR = 0x1E3779B97F4A7C15  # odd, so that multiplying by it modulo 2^64 loses nothing
_SHIFT = 29


def checksum(buffer: torch.Tensor) -> torch.Tensor:
    """A number of 64 bits that depends on every byte of a buffer and its place, computed where the buffer is: copying
    weights from a GPU to hash them would take longer than to send them. It detects mistakes, not malice."""
    padding = -len(buffer) % _ALIGNMENT
    padded = torch.nn.functional.pad(buffer, (0, padding)) if padding else buffer
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for block in padded.view(torch.int64).split(_BLOCK_WORDS):
        factors = torch.arange(1, 2 * len(block), 2, device=buffer.device) * _FACTOR
        # The high bits go down first: a multiplication carries differences only up, and those at the top out.
        total = _mixed(total) * _FACTOR + (_mixed(block) * factors).sum()
    return total


def _mixed(words: torch.Tensor) -> torch.Tensor:
    return words ^ (words >> _SHIFT)


def open_meeting(
    device: torch.device, address: str, world_size: int, timeout_s: float
) -> tuple[dict[str, str | int], Callable[[], Group]]:
    """Prepare a group in which the calling process has rank 0.

    Args:
        address: an address of this machine at which the other processes can reach it.

    Returns:
        What the others need to know, as fields of `TransferGroup`; and a function that joins the group, and returns
        once all others have.
    """
    if device.type == "cuda":
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        # Not vLLM's other way, in which the id is a pickle that any process on the network could replace.
        unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        meeting_point = {"nccl_unique_id_b64": base64.b64encode(unique_id).decode()}
        return meeting_point, partial(uid_init_process_group, unique_id, 0, world_size, device)
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    store = torch.distributed.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
        use_libuv=False,  # as vLLM does it with a socket that is open already
    )
    return {"master_address": address, "master_port": port}, partial(GlooGroup, store, 0, world_size, timeout_s)
