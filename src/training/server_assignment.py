"""Which server a process of the training talks to, where there are several: one for each machine.

Every process has its own server: it is played for by that one, and asks it for its rewards. Of the processes that share
a server the first one speaks to it for all: it has weights loaded, and engines put to sleep and woken. So weights are
published once for each server, and no process needs to reach another machine's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from config.base import GenerationConfig
from src.errors import ConfigError
from src.server.auth import token_for
from src.server.client import server_url
from src.training.collective import Processes, on_every_process

Result = TypeVar("Result")


@dataclass(frozen=True)
class OwnServer:
    """The server of one process: its place among all, its address, and whether this process speaks for those that
    share it."""

    index: int
    url: str
    speaks: bool

    def for_all(self, processes: Processes, action: Callable[[], Result]) -> Result | None:
        """Have the action done once for each server; for all processes at once.

        Returns:
            Its result, on the processes that speak; None on the others.

        Raises:
            ClassroomError: on every process, if it failed for any server.
        """
        return on_every_process(processes, action if self.speaks else lambda: None)


def own_server(generation: GenerationConfig, rank: int, processes: int) -> OwnServer:
    """The server of this process: processes are dealt out in order, so that those of one machine, which accelerate
    numbers in a row, come to the same server if there is one for each machine.

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
    return OwnServer(index, urls[index].rstrip("/"), speaks=places.index(index) == rank)
