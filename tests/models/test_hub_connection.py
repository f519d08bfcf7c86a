"""A dry run without a network: it asks the Hub once, and reports what it therefore does not know."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.memory.sources import NotEstimated, read_shape
from classroom_rl.models import pretrained as hub_connection

SILENT, FAILING, HERE = "silent", "failing", "here"
_REPLIES = {
    FAILING: b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    HERE: b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
}


@contextmanager
def hub(kind: str) -> Iterator[tuple[str, list[str]]]:
    """An endpoint: its address, and the first lines of the requests that reach it. A silent one never answers."""
    requests: list[str] = []
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                requests.append(connection.recv(65536).decode().partition("\r\n")[0])
                connections.append(connection)
                if kind != SILENT:
                    connection.sendall(_REPLIES[kind])
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", requests
        listening.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


@pytest.fixture
def endpoint_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the Hub's address, which is asked anew. It counts as online."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub_connection.why_unreachable.cache_clear()
    yield lambda address: monkeypatch.setattr(constants, "ENDPOINT", address)
    hub_connection.why_unreachable.cache_clear()


def dry_run(endpoint: str, cache: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": cache, "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "train_rl.py", "--config-name", "7b", "dry_run=true", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_a_dry_run_asks_a_hub_out_of_reach_once_for_all_models(tmp_path):
    with hub(SILENT) as (endpoint, requests):
        result = dry_run(endpoint, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert len(requests) == 1 and requests[0].startswith("HEAD / ")
    reason = f"the Hugging Face Hub ({endpoint}) does not answer"
    for model in ("Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-14B-Instruct-AWQ"):
        line = next(line for line in result.stdout.splitlines() if f"{model} has not been fetched before" in line)
        assert reason in line and "its size is not known, and so not what it needs of the memory" in line


def test_a_hub_that_fails_is_asked_once(endpoint_is):
    with hub(FAILING) as (endpoint, requests):
        endpoint_is(endpoint)
        assert {hub_connection.why_unreachable() for _ in range(2)} == {
            f"the Hugging Face Hub ({endpoint}) answers with status 503"
        }
    assert len(requests) == 1


def test_a_connection_that_is_refused_is_told_from_one_that_hangs(endpoint_is):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    endpoint_is(f"http://127.0.0.1:{port}")
    assert "cannot be reached" in hub_connection.why_unreachable()
    with pytest.raises(NotEstimated, match="cannot be reached.*has not been fetched before: its size is not known"):
        read_shape("nobody/of-this-name")


def test_names_that_are_not_resolved_in_time_are_not_waited_for(endpoint_is, monkeypatch):
    """A resolver cannot be interrupted, and it has no limit of its own that a client could set."""
    resolved = threading.Event()
    monkeypatch.setattr(hub_connection, "ANSWERS_WITHIN_S", 0.05)
    monkeypatch.setattr(hub_connection, "_ask", lambda endpoint: resolved.wait(60) and None)
    assert "does not answer within 0.05 s" in hub_connection.why_unreachable()
    resolved.set()


def test_offline_nothing_is_asked(endpoint_is, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with hub(HERE) as (endpoint, requests):
        endpoint_is(endpoint)
        assert hub_connection.why_unreachable() == "HF_HUB_OFFLINE is set"
    assert not requests


def test_a_hub_that_answers_is_asked_for_models_and_a_folder_needs_none(endpoint_is, tmp_path):
    with hub(HERE) as (endpoint, requests):
        endpoint_is(endpoint)
        assert hub_connection.read_options(str(tmp_path)) == {} and not requests
        assert hub_connection.read_options("nobody/of-this-name") == {} and len(requests) == 1
        assert hub_connection.why_unreachable() is None and len(requests) == 1
