"""Which server each training process talks to, if there are several servers: one per machine.

Each process is assigned one server, which plays and scores its episodes. The first of the processes
that share a server is its leader: it has the server load weights and puts the server's engines to sleep. So weights are
published once per server, and no process needs to reach the server of another machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from classroom_rl.config.base import GenerationConfig
from classroom_rl.errors import ConfigError
from classroom_rl.server.auth import token_for
from classroom_rl.server.client import server_url
from classroom_rl.trainer.collective import Processes, on_every_process

Result = TypeVar("Result")


@dataclass(frozen=True)
class AssignedServer:
    """The server of one process: its position in `generation.server_urls`, its address, and whether this process is the
    leader of those that share it."""

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
    numbers the processes of a machine in a row, so with one server per machine they share it.

    Raises:
        ConfigError: if there are more servers than processes, or a token is missing.
    """
    urls: Sequence[str] = generation.server_urls or [server_url(generation)]
    if len(urls) > processes:
        raise ConfigError(
            f"generation.server_urls names {len(urls)} servers, but the training has {processes} processes: each "
            "server plays for at least one. Name fewer servers, or start more processes."
        )
    places = [each * len(urls) // processes for each in range(processes)]
    index = places[rank]
    if generation.server_urls is None:
        token_for(generation.server_host)
    else:
        token_for(urlsplit(urls[index]).hostname or "", "generation.server_urls")
    return AssignedServer(index, urls[index].rstrip("/"), is_leader=places.index(index) == rank)
