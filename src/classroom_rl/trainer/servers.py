"""Which server each training process talks to, and how trainer and server take turns on a GPU that they share.

Each process is assigned one server, which plays and scores its episodes. The first of the processes
that share a server is its leader: it has the server load weights and puts the server's engines to sleep. So weights are
published once per server, and no process needs to reach the server of another machine.

With more servers than processes, all servers play for every process (`balancing.py`), and the first process is the
leader of all. They need GPUs of their own then. Otherwise they may share the trainer's:

    engines asleep     the trainer steps, and writes the new weights to disk; a server that dies now restarts but loads
                       no engine yet (server/gpu_lease.py)
    make_room          every rank returns PyTorch's cached memory to the GPU
    /load_weights      the teacher's engine wakes for its new weights
    wake_engines       the other engines wake, and every rank samples
    sleep_engines      the engines fall asleep, once every rank has sampled

The trainer's weights and optimizer states stay where they are throughout.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from accelerate import PartialState
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache

from classroom_rl.config.base import GenerationConfig
from classroom_rl.errors import ConfigError
from classroom_rl.results.step_time import Placement
from classroom_rl.server.auth import token_for
from classroom_rl.server.client import ClassroomClient, server_url
from classroom_rl.server.engine_sleep import GpuLease, this_process
from classroom_rl.server.schemas import Health, ProcessId
from classroom_rl.system.distributed import gpu_id
from classroom_rl.trainer.balancing import BalancedServers
from classroom_rl.trainer.collective import Processes, on_every_process

logger = logging.getLogger(__name__)


Result = TypeVar("Result")


@dataclass(frozen=True)
class AssignedServer:
    """The server of one process: its position in `generation.server_urls`, its address, and whether this process is the
    leader of those that share it. With more servers than processes it stands for all of them."""

    index: int
    url: str
    is_leader: bool

    def once_per_server(self, processes: Processes, action: Callable[[], Result]) -> Result | None:
        """Run the action on each server's leader; all processes call this together.

        Returns:
            The action's result on leaders; None on the others.

        Raises:
            ClassroomError: on every process, if the action failed on any leader.
        """
        return on_every_process(processes, action if self.is_leader else lambda: None)


def assign_server(generation: GenerationConfig, rank: int, processes: int) -> AssignedServer:
    """Assign a server to the process of this rank. Ranks are split into contiguous blocks, one per server. accelerate
    numbers the processes of a machine in a row, so with one server per machine they share it. If there are more servers
    than processes, each process uses all of them.

    Raises:
        ConfigError: if a token is missing.
    """
    urls: Sequence[str] = generation.server_urls or [server_url(generation)]
    uses_all = len(urls) > processes
    server_indices = [0 if uses_all else process * len(urls) // processes for process in range(processes)]
    index = server_indices[rank]
    if generation.server_urls is None:
        token_for(generation.server_host)
    else:
        for url in urls if uses_all else [urls[index]]:
            token_for(urlsplit(url).hostname or "", "generation.server_urls")
    return AssignedServer(index, urls[index].rstrip("/"), is_leader=server_indices.index(index) == rank)


def clients_of_all_servers(generation: GenerationConfig) -> list[ClassroomClient]:
    """A client of each server of the run."""
    urls: Sequence[str] = generation.server_urls or [server_url(generation)]
    return [ClassroomClient(url, load_timeout_s=generation.load_weights_timeout_s) for url in urls]


class SharedGpus:
    """Puts the server's engines to sleep and wakes them when trainer and server share GPUs.

    All ranks call each method together. Without `shared` the methods do nothing.

    Raises:
        ClassroomError: each method, on every rank, if the server failed to sleep or wake.
    """

    def __init__(
        self, client: ClassroomClient | BalancedServers, server: AssignedServer, shared: bool, run_folder: Path
    ):
        self._client = client
        self._server = server
        self._shared = shared
        self._lease = GpuLease(run_folder, server.index)
        self._state = PartialState()

    @classmethod
    def with_server(
        cls,
        client: ClassroomClient | BalancedServers,
        server: AssignedServer,
        colocate: bool | None,
        run_folder: Path,
    ) -> "SharedGpus":
        """Set `shared` from `generation.colocate`; if that is null, from whether any server uses one of this trainer's
        GPUs.

        Raises:
            ConfigError: if GPUs are to be shared and the server's engines cannot sleep, or there are more servers than
                processes.
        """
        state = PartialState()
        own_gpus = gather_object([gpu_id(state.device)])
        must_sleep = server.once_per_server(state, lambda: engines_have_to_sleep(colocate, client.health(), own_gpus))
        shared = any(gather_object([must_sleep]))
        if shared and isinstance(client, BalancedServers):
            raise ConfigError(
                "generation.server_urls names more servers than the training has processes, and one of them uses a GPU "
                "of the trainer's, or generation.colocate is true: only a server of its own takes turns with a process"
                ". Give the servers GPUs of their own and set generation.colocate=false, or start more processes."
            )
        if shared and state.is_main_process:
            logger.info("server and trainer take turns on the GPUs (generation.colocate)")
        return cls(client, server, shared, run_folder)

    @property
    def placement(self) -> Placement:
        """Where server and trainer run, as the page's advice has to know it."""
        if self._state.device.type == "cpu":
            return "cpu"
        return "shared" if self._shared else "split"

    def sleep_engines(self) -> None:
        """Have all engines sleep, once every rank has reached this call."""
        if self._shared:
            processes = gather_object([(self._server.index, this_process())])
            trainer = [process for index, process in processes if index == self._server.index]
            self._server.once_per_server(self._state, lambda: self._sleep_and_lease(trainer))

    def make_room(self) -> None:
        """Return cached memory to the GPUs and end the lease, before engines wake or a restarted server loads them."""
        if self._shared:
            clear_device_cache(garbage_collection=True)
            self._state.wait_for_everyone()
            self._server.once_per_server(self._state, self._lease.end)

    def wake_engines(self) -> None:
        """Make room on the GPUs and have the server wake its engines."""
        if self._shared:
            self.make_room()
            self._server.once_per_server(self._state, self._client.wake_up)

    def refuse_playing_ahead(self) -> None:
        """Refuse to play a batch while another one is trained on, if engines have to sleep meanwhile.

        Raises:
            ConfigError: if they do.
        """
        if self._shared:
            raise ConfigError(
                "train.max_staleness is 1, so the next batch would be played while this one is trained on, but server "
                "and trainer take turns on their GPUs (generation.colocate). Give the server GPUs of its own, or set "
                "train.max_staleness=0."
            )

    def refuse_sending(self) -> None:
        """Refuse to send weights from GPU to GPU where these are the same ones: NCCL takes each only once.

        Raises:
            ConfigError: if they are.
        """
        own_gpus = set(gather_object([gpu_id(self._state.device)])) - {None}
        shares_gpus = self._server.once_per_server(self._state, lambda: _uses_any(self._client.health(), own_gpus))
        if self._shared or any(gather_object([shares_gpus])):
            raise ConfigError(
                "train.publish_through is nccl, which sends weights between different GPUs, but server and trainer use "
                "the same ones (generation.colocate). Give the server GPUs of its own, or set "
                "train.publish_through=memory."
            )

    def _sleep_and_lease(self, trainer: Sequence[ProcessId]) -> None:
        """Sleep first: with a lease, a server that died before its engines slept would not load them, so the call to
        `sleep` would wait for it in vain."""
        self._client.sleep(trainer)
        self._lease.take(trainer)


def _uses_any(server: Health, gpus: Collection[str]) -> bool:
    return any(set(engine.gpus) & set(gpus) for engine in server.roles.values())


def engines_have_to_sleep(colocate: bool | None, server: Health, trainer_gpus: Sequence[str | None]) -> bool:
    """Whether the server's engines have to sleep while a trainer on the GPUs `trainer_gpus` steps.

    Raises:
        ConfigError: if `colocate` is true and an engine was started without sleep mode.
    """
    engines = server.roles.values()
    if colocate and any(engine.gpus and not engine.can_sleep for engine in engines):
        raise ConfigError(
            "generation.colocate is true, but the server's engines cannot give their GPU's memory back: it was started "
            "with generation.colocate=false, or vLLM has no sleep mode on this kind of GPU. Start server and trainer "
            "with the same generation.colocate."
        )
    if colocate is not None:
        return colocate
    return any(engine.can_sleep and set(engine.gpus) & set(trainer_gpus) for engine in engines)
