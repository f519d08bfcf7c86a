"""Who may ask the server: names, pages of others, websockets, and the token."""

import asyncio
import ipaddress
import logging
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI, WebSocket
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient, WebSocketDenialResponse

import classroom_rl.server.app
import classroom_rl.server.middleware
from classroom_rl.errors import ConfigError
from classroom_rl.server.app import LARGEST_HEAD
from classroom_rl.server.auth import TOKEN_VARIABLE, token_for
from classroom_rl.server.middleware import HostCheck
from classroom_rl.trainer.servers import assign_server
from tests.server.conftest import BODY, HERE, TOKEN, answers_everything
from tests.support.configs import training
from tests.support.scripted_room import Room
from tests.support.scripted_room import application as application_of

# Before any token ----------------------------------------------------------------------------------------------------


def test_endless_headers_are_refused_before_they_fill_the_memory(listening: str) -> None:
    """They are read before the token is."""
    address = urlsplit(listening)
    with socket.create_connection((address.hostname, address.port), timeout=120) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        sent = 0
        with suppress(ConnectionError):  # the server hangs up
            while sent < 100 * LARGEST_HEAD and not select.select([connection], [], [], 0)[0]:
                sent += connection.send(b"x-filler: " + b"x" * 4000 + b"\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    assert sent < 100 * LARGEST_HEAD


def test_a_token_is_compared_in_constant_time_only(app: Callable[..., FastAPI], monkeypatch) -> None:
    """By no other means than `hmac.compare_digest`: where that says no, the right token is refused."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    compared = []

    def refuse(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return False

    with TestClient(app(), base_url=HERE) as client:
        authorized = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/health", headers=authorized).status_code == 200
        monkeypatch.setattr(classroom_rl.server.middleware.hmac, "compare_digest", refuse)
        for headers in (authorized, {}, {"Authorization": "Bearer x"}):
            assert client.get("/health", headers=headers).status_code == 401
    expected = f"Bearer {TOKEN}".encode()
    assert compared == [(expected, expected), (b"", expected), (b"Bearer x", expected)]


# Whose request it is --------------------------------------------------------------------------------------------

FOREIGN_NAMES = [
    "evil.example",
    "evil.example:8005",
    "127.evil.example",
    "127.0.0.1.evil.example:8005",
    "localhost.evil",
]
FOREIGN_PAGES = ["http://evil.example", "https://evil.example:8005", "null", "http://localhost:3000", "file://"]


def every_route(application: FastAPI) -> list[tuple[str, str]]:
    """Those of the server, of a mounted application, and some that are not there."""
    real_routes = [(method, route.path) for route in application.routes for method in getattr(route, "methods", ())]
    others = [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/no/such/route"), ("OPTIONS", "/sleep")]
    return [*real_routes, *others]


@pytest.mark.parametrize(
    "headers", [*({"Host": name} for name in FOREIGN_NAMES), *({"Origin": p} for p in FOREIGN_PAGES)]
)
def test_no_route_answers_under_a_foreign_name_or_for_a_foreign_page(app, room: Room, published: Path, headers) -> None:
    application = app()
    application.mount("/v1", answers_everything)
    all_routes = every_route(application)
    assert {("POST", "/load_weights"), ("POST", "/wake_up"), ("POST", "/api/corrections/decision")} <= set(all_routes)
    assert ("GET", "/") in all_routes
    policy_before = room.teacher.policy
    with TestClient(application, base_url=HERE, raise_server_exceptions=False) as client:
        for method, path in all_routes:
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == 403, (method, path)
            assert method == "HEAD" or next(iter(headers.values())) in answer.json()["detail"]
        weights = {"run_id": "run", "version": 1, "path": str(published)}
        assert client.post("/load_weights", json=weights, headers=headers).status_code == 403
        assert room.teacher.policy == policy_before and not room.teacher.calls
        for method, path in all_routes:
            assert client.request(method, path).status_code != 403, (method, path)


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_websockets_are_refused_under_a_foreign_name(app: Callable[..., FastAPI], headers: dict) -> None:
    application = app()

    @application.websocket("/socket")
    async def socket(connection: WebSocket) -> None:
        await connection.accept()
        await connection.close()

    with TestClient(application, base_url=HERE) as client:
        with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect("/socket", headers=headers):
            pass
        assert refused.value.status_code == 403
        with client.websocket_connect("/socket", headers={"Host": "127.0.0.1:8005"}):
            pass


@pytest.mark.parametrize(
    "headers",
    [
        *({"Host": name} for name in ("localhost:9", "LOCALHOST", "127.1.2.3:80", "[::1]:8005", "10.0.0.7:8005")),
        {"Host": "localhost:9000", "Origin": "http://localhost:9000"},  # the page, through a tunnel
        {"Host": "192.0.2.7:80", "Origin": "http://192.0.2.7:80"},
        {"Host": "Host.Docker.internal:8005", "Origin": "http://host.docker.internal:8005"},
        {"Origin": "https://host.docker.internal"},
    ],
)
def test_this_machine_s_names_addresses_and_allowed_names_are_answered(room, generation, monkeypatch, headers) -> None:
    generation = replace(generation, allowed_hosts=["host.docker.internal"])
    application = application_of(room, generation, monkeypatch)()
    with TestClient(application, base_url=HERE) as client:
        assert client.get("/health", headers=headers).status_code == 200


LABEL = st.text("0123456789abcdefx-_.:[]%@/ \té", max_size=30)


@settings(max_examples=100)
@given(
    LABEL
    | st.sampled_from(["127.", "localhost.", "127.0.0.1@", "[::1].", "127.0.0.1:", "0x7f."]).flatmap(
        lambda begin: LABEL.map(lambda rest: begin + rest)
    )
)
def test_no_name_but_ours_is_taken_for_ours(host: str) -> None:
    """Whatever passes is an address, with or without a port, or localhost."""
    if status_for([(b"host", host.encode("latin-1"))]) == 200:
        name, _, port = host.rpartition(":") if host.count(":") == 1 or "]:" in host else (host, "", "0")
        assert port.isdecimal() and (name == "localhost" or ipaddress.ip_address(name.strip("[]")))


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1", "evil.example"], ["evil.example", "127.0.0.1"], [""]])
def test_a_request_with_no_name_or_with_two_is_refused(hosts: list[str]) -> None:
    assert status_for([(b"host", host.encode()) for host in hosts]) == 403


def status_for(headers: list[tuple[bytes, bytes]]) -> int:
    messages = []

    async def send(message: dict) -> None:
        messages.append(message)

    scope = {"type": "http", "method": "POST", "path": "/sleep", "headers": headers}
    asyncio.run(HostCheck(answers_everything)(scope, None, send))
    return messages[0]["status"]


# The token -----------------------------------------------------------------------------------------------------


def routes(application: FastAPI) -> list[tuple[str, str]]:
    return [(method, route.path) for route in application.routes for method in route.methods]


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_no_route_answers_without_the_token(app: Callable[..., FastAPI], monkeypatch, host: str) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    application = app(host)
    guarded_routes = [(method, path) for method, path in routes(application) if path not in ("/", "/viewer/{name}")]
    assert {("GET", "/health"), ("POST", "/load_weights"), ("GET", "/metrics")} <= set(guarded_routes)
    assert ("POST", "/api/corrections/decision") in guarded_routes
    wrong_headers = [{}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}, {"Authorization": "Bearer "}]
    with TestClient(application, raise_server_exceptions=False) as client:
        for method, path in (*guarded_routes, ("GET", "/no/such/route"), ("POST", "/health")):
            for headers in wrong_headers:
                answer = client.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path, headers)
                assert answer.headers["WWW-Authenticate"] == "Bearer"
            authorized = client.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"})
            assert authorized.status_code != 401, (method, path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "my-machine"])
def test_a_server_for_others_does_not_start_without_a_token(app: Callable[..., FastAPI], monkeypatch, host) -> None:
    with pytest.raises(ConfigError, match=r"other machines can reach.*CLASSROOM_TOKEN.*openssl rand -hex 32"):
        app(host)
    with pytest.raises(ConfigError, match="CLASSROOM_TOKEN"):
        assign_server(training(f"generation.server_host='{host}'").generation, 0, 1)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert app(host) and token_for(host) == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_server_for_this_machine_needs_none(host: str) -> None:
    assert token_for(host) is None


@pytest.mark.parametrize("token", ["short", "with a space in the middle", "ünicode-ünicode-ünicode", "a" * 20 + "\n"])
def test_what_is_no_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match="CLASSROOM_TOKEN must be at least 16 ASCII characters") as caught:
        token_for("127.0.0.1")
    assert token not in str(caught.value)


def test_the_token_is_written_nowhere(app, room: Room, monkeypatch, caplog, capfd) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    caplog.set_level(logging.DEBUG)
    with TestClient(app("0.0.0.0"), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        assert client.post("/sample_conversations", json=BODY).status_code == 200
        assert client.post("/load_weights", json={"run_id": "r", "version": 0, "path": "/"}).status_code == 422
        output = client.get("/health").text + client.get("/metrics").text + client.get("/openapi.json").text
    classroom_rl.server.app.record_run(training(f"logging.save_dir='{room.folder}'"), "vllm_server")
    files = [path for path in room.folder.rglob("*") if path.is_file()]
    assert len(files) >= 3
    output += caplog.text + "".join(capfd.readouterr()) + "".join(path.read_text() for path in files)
    assert TOKEN not in output
