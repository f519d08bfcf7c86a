"""Sends weights from the memory of the trainer's main process into the engines of all servers: by NCCL between GPUs, by
gloo between CPUs.

The main thread gathers weights and fills buffers. A second thread broadcasts them, and one for each server waits for
its answer. NCCL would wait for a process that hangs for ever, so these threads are daemons: a failure shows in the
answer of a server, which has a deadline. Then the group is left; a server whose engine may hold half a version ends it
and starts again, and the next attempt forms a new group.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from queue import Empty, Full, Queue
from urllib.parse import urlsplit
from uuid import uuid4

import torch

from classroom_rl.config.values import is_loopback
from classroom_rl.engines.vllm.weight_stream import Group, open_meeting, packed, send
from classroom_rl.errors import ConfigError, DeadlineExceeded, EngineFailure, PolicyMismatch
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.weight_transfer import TensorInfo, TransferGroup
from classroom_rl.rollout.environment import POLICY_ROLE
from classroom_rl.server.client import ClassroomClient
from classroom_rl.server.schemas import ReceiveWeightsRequest
from classroom_rl.trainer.collective import in_thread
from classroom_rl.trainer.sharded_save import Weights

BUFFER_BYTES = 2**25
_SECONDS_BETWEEN_CHECKS = 0.1
_THREAD = "sending weights"
_GIVEN_UP = torch.empty(0, device="meta")


class WeightSender:
    """Sends versions to all servers at once. The group of processes stays from one version to the next, until a sending
    fails or a server starts its engine again.

    Args:
        clients: of all servers.
        device: where the weights are.
        timeout_s: how long the processes of the group wait for each other at most.
        buffer_bytes: how many bytes are broadcast at a time.
    """

    def __init__(
        self,
        clients: Sequence[ClassroomClient],
        device: torch.device,
        timeout_s: float,
        buffer_bytes: int = BUFFER_BYTES,
    ):
        self._clients, self._device, self._timeout_s = list(clients), device, timeout_s
        self._buffer_bytes = buffer_bytes
        self._infos: list[TransferGroup] = []  # the group, as each server joins it
        self._join: Callable[[], Group] | None = None
        self._group: Future[Group] = Future()

    def wait_for_servers(self, timeout_s: float) -> None:
        """Wait until all servers answer, such as one that starts again.

        Raises:
            DeadlineExceeded: if one does not answer within `timeout_s` seconds.
        """
        for client in self._clients:
            client.wait_until_up(timeout_s)

    def send_to(self, clients: Sequence[ClassroomClient]) -> None:
        """Send to these servers from now on: others are lost, or have come back."""
        if list(clients) != self._clients:
            self._leave_group()
            self._clients = list(clients)

    def send(self, policy: PolicyVersion, tensors: Sequence[TensorInfo], pieces: Iterable[Weights]) -> None:
        """Send a version, and return when all servers have loaded it.

        Args:
            tensors: what `pieces` hold, in their order.

        Raises:
            DeadlineExceeded, EngineFailure: if a server did not receive all of it. It may be sent again.
            ConfigError: if a server's engine takes no weights in this way.
        """
        self._prepare_group()
        buffers: Queue[torch.Tensor | None] = Queue(1)
        sending = in_thread(partial(self._broadcast, self._group, self._join, buffers, tensors), _THREAD)
        calls = [
            in_thread(partial(client.receive_weights, _request(policy, info, tensors)), _THREAD)
            for client, info in zip(self._clients, self._infos, strict=True)
        ]
        try:
            for buffer in packed(pieces, tensors, self._buffer_bytes, self._device):
                _put(buffers, buffer, [*calls, sending])
            _put(buffers, None, [*calls, sending])
            wait([*calls, sending], return_when=FIRST_EXCEPTION)
            _raise_failure([*calls, sending])
        except BaseException:
            self._leave_group()
            # The queue has one place: it is emptied for the mark that ends the broadcasting thread.
            with suppress(Empty):
                buffers.get_nowait()
            with suppress(Full):
                buffers.put_nowait(_GIVEN_UP)
            for client, call in zip(self._clients, calls, strict=True):
                if not call.done():
                    in_thread(client.stop_receiving, _THREAD)
            raise
        if any(call.result().weights != sending.result() for call in calls):
            raise PolicyMismatch(f"A server answers that it received other weights than were sent as policy {policy}.")

    def _prepare_group(self) -> None:
        """Prepare a new group, unless all servers are still in the last one."""
        engines = [client.health().roles[POLICY_ROLE] for client in self._clients]
        if self._infos and all(engine.weight_group == self._infos[0].id for engine in engines):
            return
        self._leave_group()
        unable = [client.url for client, engine in zip(self._clients, engines, strict=True) if not engine.receivers]
        if unable:
            raise ConfigError(
                f"The engine of the server at {unable[0]} takes no weights from the trainer's memory: set "
                "train.publish_through=disk."
            )
        size = 1 + sum(engine.receivers for engine in engines)
        address = "" if self._device.type == "cuda" else _own_address([client.url for client in self._clients])
        meeting_point, self._join = open_meeting(self._device, address, size, self._timeout_s)
        group_id, rank = uuid4().hex, 1
        for engine in engines:
            self._infos.append(TransferGroup(group_id, rank, size, self._buffer_bytes, **meeting_point))
            rank += engine.receivers

    def _leave_group(self) -> None:
        """Close the connections of the group, so that others who wait in it notice. If it is only being formed, that is
        done as soon as it is. In a thread: closing may wait for a broadcast."""
        self._group.add_done_callback(lambda group: group.exception() or in_thread(group.result().destroy, _THREAD))
        self._infos, self._join, self._group = [], None, Future()

    def _broadcast(
        self,
        group: "Future[Group]",
        join: Callable[[], Group],
        buffers: "Queue[torch.Tensor | None]",
        tensors: Sequence[TensorInfo],
    ) -> str:
        """Broadcast the buffers until None comes. Returns their fingerprint.

        Raises:
            EngineFailure: if the group broke.
        """
        try:
            with _stream_of_its_own(self._device):
                if not group.done():
                    group.set_result(join())
                return send(_taken(buffers), tensors, group.result(), self._device)
        except RuntimeError as error:  # gloo's and NCCL's errors
            raise EngineFailure(f"The weights could not be sent on: {error}") from error


def _request(policy: PolicyVersion, group: TransferGroup, tensors: Sequence[TensorInfo]) -> ReceiveWeightsRequest:
    return ReceiveWeightsRequest(run_id=policy.run_id, version=policy.version, group=group, tensors=list(tensors))


def _own_address(urls: Sequence[str]) -> str:
    """The address of this machine from which it reaches the servers; if some are elsewhere, from which it reaches the
    first of those.

    Raises:
        DeadlineExceeded: if that server cannot be reached.
    """
    split_urls = [urlsplit(url) for url in urls]
    server = next((url for url in split_urls if not is_loopback(url.hostname or "")), split_urls[0])
    try:
        family, kind, _, _, address = socket.getaddrinfo(server.hostname, server.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as connection:
            connection.connect(address)  # of datagrams: only the route is looked up
            return connection.getsockname()[0]
    except OSError as error:
        raise DeadlineExceeded(f"{server.netloc} cannot be reached: {error}.") from error


def _stream_of_its_own(device: torch.device) -> AbstractContextManager:
    """On a GPU, a context with a stream of its own: if a broadcast hangs, the main thread's work does not."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _put(buffers: "Queue[torch.Tensor | None]", buffer: torch.Tensor | None, threads: Sequence[Future]) -> None:
    """Put a buffer into the queue as soon as there is room, unless one of the threads fails meanwhile."""
    while True:
        _raise_failure(threads)
        with suppress(Full):
            return buffers.put(buffer, timeout=_SECONDS_BETWEEN_CHECKS)


def _taken(buffers: "Queue[torch.Tensor | None]") -> Iterator[torch.Tensor]:
    """The buffers in a queue, until None comes.

    Raises:
        RuntimeError: if the sending was given up. The fingerprint of a part of a version must not be sent.
    """
    while (buffer := buffers.get()) is not None:
        if buffer is _GIVEN_UP:
            raise RuntimeError("the sending was given up")
        yield buffer


def _raise_failure(threads: Sequence[Future]) -> None:
    for thread in threads:
        if thread.done():
            thread.result()
