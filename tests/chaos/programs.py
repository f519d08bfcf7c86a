"""The programs of a case, as processes of their own: a server with scripted engines, and what is configured of it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.processes import Child, Signals
from tests.conftest import free_port, quickstart_overrides
from tests.support import scripted_server

KEYS = {
    "CLASSROOM_TOKEN": "chaos-3f9c1d7be0a24c55a6b8d9e0f1a2b3c4",
    "HF_TOKEN": "hf_ChAoSQwErTyUiOpAsDfGhJkLzXcVbNm12",
    "CHAOS_API_KEY": "sk-chaos-0f1e2d3c4b5a69788796a5b4c3d2",
}
"""Keys in the environment of every program of the suite; nothing that a run leaves may hold one."""


def files_with_keys(folder: Path) -> list[str]:
    """The files below a folder that hold one of the keys."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    secrets = [value.encode() for value in KEYS.values()]
    return [str(path.relative_to(folder)) for path in files if any(key in path.read_bytes() for key in secrets)]


def overrides_of(folder: Path, world: Path, *more: str) -> tuple[list[str], int]:
    """The quickstart with short conversations of an untrained model, in a run folder, and the server's port."""
    port = free_port()
    return [*quickstart_overrides(folder, world / "blank", world, port), *more], port


def start_server(
    overrides: Sequence[str], log: Path, signals: Signals, environment: Mapping[str, str] | None = None
) -> Child:
    """A server with scripted engines, on these arguments."""
    return Child("the server", scripted_server.command(overrides), signals, log, environment=environment)


@contextmanager
def running_server(overrides: Sequence[str], port: int, log: Path) -> Iterator[tuple[Child, ClassroomClient]]:
    """A server that answers, and a client of it."""
    with Signals() as signals, start_server(overrides, log, signals) as server:
        client = ClassroomClient(f"http://127.0.0.1:{port}", log=log)
        client.wait_until_up(120, alive=lambda: server.poll() is None)
        yield server, client


def wait_for(condition, what: str, seconds: float = 120.0) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: if it does not within this many seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)
