"""The trainer's side of GPUs that it shares with the server: they take turns.

    engines asleep     the trainer steps, and writes the new weights to disk; a server that dies now comes back without
                       engines (src/server/gpu_lease.py)
    make_room          what the trainer keeps for later use only goes back to the GPU, on every rank
    /load_weights      the teacher wakes for its new weights
    leave              the other engines wake, and every rank samples
    take               once every rank is done, the engines fall asleep

The trainer's weights and optimizer states stay where they are throughout.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache

from src.errors import ConfigError
from src.server.client import ClassroomClient
from src.server.engine_sleep import this_process
from src.server.gpu_lease import GpuLease
from src.server.schemas import Health, ProcessId
from src.training.server_assignment import OwnServer
from src.vllm.worker_extension import gpu_id

logger = logging.getLogger(__name__)


class SharedGpus:
    """Whose turn it is; without `shared`, nothing happens. Every method is for all ranks at once.

    Raises:
        ClassroomError: each method, on every rank, if the server did not do its part.
    """

    def __init__(self, client: ClassroomClient, server: OwnServer, shared: bool, run_folder: Path):
        self._client = client
        self._server = server
        self._shared = shared
        self._lease = GpuLease(run_folder, server.index)
        self._state = PartialState()

    @classmethod
    def with_server(
        cls, client: ClassroomClient, server: OwnServer, colocate: bool | None, run_folder: Path
    ) -> "SharedGpus":
        """Find out whether any server uses GPUs of this trainer's, unless `generation.colocate` says it.

        Raises:
            ConfigError: if it is to, and cannot.
        """
        state = PartialState()
        own = gather_object([gpu_id(state.device)])
        found = server.for_all(state, lambda: takes_turns(colocate, client.health(), own))
        shared = any(gather_object([found]))
        if shared and state.is_main_process:
            logger.info("server and trainer take turns on the GPUs (generation.colocate)")
        return cls(client, server, shared, run_folder)

    def take(self) -> None:
        """Every rank is done with the engines: have them sleep."""
        if self._shared:
            processes = gather_object([(self._server.index, this_process())])
            borrowers = [process for index, process in processes if index == self._server.index]
            self._server.for_all(self._state, lambda: self._borrow(borrowers))

    def make_room(self) -> None:
        """Give cached memory back to the GPUs, before engines wake or a server that died loads them."""
        if self._shared:
            clear_device_cache(garbage_collection=True)
            self._state.wait_for_everyone()
            self._server.for_all(self._state, self._lease.end)

    def leave(self) -> None:
        """Leave the GPUs to the engines, which are all awake afterwards."""
        if self._shared:
            self.make_room()
            self._server.for_all(self._state, self._client.wake_up)

    def _borrow(self, borrowers: Sequence[ProcessId]) -> None:
        """In this order: a server that died before its engines slept has to come back for them to sleep."""
        self._client.sleep(borrowers)
        self._lease.take(borrowers)


def takes_turns(colocate: bool | None, server: Health, own: Sequence[str | None]) -> bool:
    """Whether the server's engines have to sleep while a trainer on the GPUs `own` steps.

    Raises:
        ConfigError: if they are to, and were started without being able to.
    """
    engines = server.seats.values()
    if colocate and any(engine.gpus and not engine.can_sleep for engine in engines):
        raise ConfigError(
            "generation.colocate is true, but the server's engines cannot give their GPU's memory back: it was started "
            "with generation.colocate=false, or vLLM has no sleep mode on this kind of GPU. Start server and trainer "
            "with the same generation.colocate."
        )
    if colocate is not None:
        return colocate
    return any(engine.can_sleep and set(engine.gpus) & set(own) for engine in engines)
