"""The application with scripted engines, inside this process or on a port."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from classroom_rl.config.base import GenerationConfig
from classroom_rl.models.policy_folder import policy_path, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.server.schemas import ProcessId
from tests.conftest import free_port
from tests.models.test_policy_folder import save_model
from tests.support.scripted_room import Room, serving
from tests.support.scripted_room import application as application_of

HERE = "http://127.0.0.1:8005"
TOKEN = "0123456789abcdef-0123456789"
BODY = {"problems": ["fractions"], "answers": ["1/2"], "request_id": "r", "seed": 1, "step": 0}


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def app(room: Room, generation: GenerationConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FastAPI]:
    """Makes the real application with scripted engines in its roles."""
    return application_of(room, generation, monkeypatch)


@pytest.fixture
def http(app: Callable[..., FastAPI]) -> Iterator[TestClient]:
    with TestClient(app(), base_url=HERE, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def listening(app: Callable[..., FastAPI]) -> Iterator[str]:
    """The URL of the application on a port of this machine."""
    port = free_port()
    with serving(app(port=port), port) as url:
        yield url


@pytest.fixture
def published(room: Room) -> Path:
    """A policy that was published: version 1 of the run `run`."""
    folder = policy_path(room.folder, 1)
    write_policy(folder, PolicyVersion("run", 1), save_model)
    return folder


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen]:
    """A process that could be a trainer."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def id_of(process: subprocess.Popen) -> ProcessId:
    started = psutil.Process(process.pid).create_time()
    return ProcessId(host=socket.gethostname(), pid=process.pid, started=started)


async def answers_everything(scope: dict, receive: Callable, send: Callable) -> None:
    await JSONResponse({})(scope, receive, send)
