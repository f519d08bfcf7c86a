"""ASGI middleware in front of the server's routes: checks the host name, the token and the body of each request."""

import hmac
import ipaddress
import json
import re
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from classroom_rl.errors import AccessDenied, DataError, ForeignRequest, RequestTooLarge
from classroom_rl.rollout.text import has_surrogates, without_surrogates
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.server.schemas import LARGEST_BODY

_NO_TOKEN = (
    "This server wants the token that it was started with, as Authorization: Bearer …. The programs of this project "
    f"send what the environment variable {TOKEN_VARIABLE} holds."
)
_TOO_LARGE = f"The body is larger than the {LARGEST_BODY} bytes that this server takes: split the request."
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\\\s]+)(?::[0-9]{1,5})?")
_HOST_HEADERS = (b"host", b"origin")
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def add_request_checks(
    app: FastAPI, token: str | None, allowed_hosts: Collection[str] = (), open_paths: Collection[str] = ()
) -> None:
    """Add the checks to every route, including those of mounted applications and websockets.

    Args:
        token: the token that a request must carry. A server without one listens to this machine only, but every web
            page in a browser on this machine could send it requests: `HostCheck` refuses those.
        allowed_hosts: host names, in addition to localhost, under which a server without a token answers.
        open_paths: paths that can be read without the token.
    """
    app.add_middleware(BodyCheck)
    if token is None:
        app.add_middleware(HostCheck, allowed_hosts=allowed_hosts)
    else:
        app.add_middleware(TokenRequired, token=token, open_paths=frozenset(open_paths))


class HostCheck:
    """ASGI middleware: refuses requests whose Host is not localhost, an IP address or an allowed name, and requests
    from pages of other sites.

    The page of another site can let its own name resolve to this machine (DNS rebinding). The browser then lets it read
    and write here as if it came from this server; its requests have that name in the Host header. Or it sends requests
    without reading the responses; these have its name in the Origin header. Programs send no Origin.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str] = ()):
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = None if scope["type"] == "lifespan" else self._refusal(scope["headers"])
        if reason is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"detail": reason}, ForeignRequest.status)(scope, receive, send)

    def _refusal(self, headers: Collection[tuple[bytes, bytes]]) -> str | None:
        """Return the reason to refuse a request; None to let it through."""
        hosts, origins = (
            [value.decode("latin-1") for name, value in headers if name == header] for header in _HOST_HEADERS
        )
        host = hosts[0] if len(hosts) == 1 else " and ".join(hosts)
        if not self._is_allowed(host):
            return (
                f"This server has no token and answers under the name localhost, under an IP address and under the "
                f"names in generation.allowed_hosts, not under {host[:200]!r}. Open it as http://127.0.0.1:…, add the "
                f"name there, or start the server with a token in {TOKEN_VARIABLE}."
            )
        for origin in origins:
            origin_host = origin.lower().removeprefix("http://").removeprefix("https://")
            if origin_host != host.lower() and _host_name(origin_host) not in self._allowed:
                return (
                    f"This server has no token and answers its own page and programs, not a page of {origin[:200]!r}. "
                    "Add its host to generation.allowed_hosts if it is yours."
                )
        return None

    def _is_allowed(self, host: str) -> bool:
        """Whether a Host header holds localhost, an IP address or an allowed name: none of these depends on DNS."""
        name = _host_name(host)
        try:
            return name == "localhost" or name in self._allowed or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _host_name(host: str) -> str:
    """Return the name or address in a Host header, in lower case; empty if the header is malformed."""
    match = _HOST.fullmatch(host)
    return match[1].lower().strip("[]") if match else ""


class TokenRequired:
    """ASGI middleware: answers requests without the token with 401, on every route. Only `open_paths` can be read
    without it: the files of the page, which asks the user for the token."""

    def __init__(self, app: ASGIApp, token: str, open_paths: frozenset[str] = frozenset()):
        self._app = app
        self._open_paths = open_paths
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        authorization = dict(scope.get("headers", ())).get(b"authorization", b"")
        # compare_digest takes the same time wherever the two differ: timing does not reveal the token byte by byte.
        if scope["type"] == "lifespan" or self._is_open(scope) or hmac.compare_digest(authorization, self._expected):
            await self._app(scope, receive, send)
        else:
            refusal = JSONResponse({"detail": _NO_TOKEN}, AccessDenied.status, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope.get("method") == "GET" and scope.get("path") in self._open_paths


class BodyCheck:
    """ASGI middleware: reads and checks a request's body before its route runs.

    A body of more than `LARGEST_BODY` bytes is answered with 413, with or without a Content-Length, and is never held
    in memory as a whole. JSON with a lone surrogate (half of a character) is answered with 422, because no file can
    store one.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = dict(scope["headers"]).get(b"content-length", b"0")
        body = None  # the HTTP parser has checked that Content-Length is a number
        if int(content_length) <= LARGEST_BODY:
            body, receive = await _read_body(receive)
        if body is None:
            await JSONResponse({"detail": _TOO_LARGE}, RequestTooLarge.status)(scope, receive, send)
        elif _MAY_BE_SURROGATE.search(body) and (path := _path_to_surrogate(body)):
            await _surrogate_response(scope, path)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _read_body(receive: Receive) -> tuple[bytes | None, Receive]:
    """Return the whole body (None if it is too large), and a `receive` that passes it to the route again. If the client
    disconnects in the middle, the body is the part that arrived, and the route receives the disconnect."""
    messages: list[Message] = []
    size = 0
    while not messages or messages[-1].get("more_body", False):
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
        if size > LARGEST_BODY:
            return None, receive
    body = b"".join(message.get("body", b"") for message in messages)
    disconnects = [message for message in messages if message["type"] == "http.disconnect"]
    replay = disconnects or [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return replay.pop(0) if replay else await receive()

    return body, receive_again


def _path_to_surrogate(body: bytes) -> str | None:
    """Return the path (field names and list indices) to a lone surrogate in a JSON body; None if it has none, or is not
    JSON."""
    try:
        pending: list[tuple[str, Any]] = [("body", json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while pending:
        path, value = pending.pop()
        if isinstance(value, str) and has_surrogates(value):
            return without_surrogates(path)
        if isinstance(value, dict):
            pending += [(f"{path}.{name}", child) for name, child in value.items()]
            pending += [(f"{path}.{name}", name) for name in value]
        elif isinstance(value, list):
            pending += [(f"{path}.{index}", child) for index, child in enumerate(value)]
    return None


def _surrogate_response(scope: Scope, path: str) -> JSONResponse:
    """Return the error response, in the same form as the route's other errors: OpenAI's or ours."""
    message = (
        f"{path}: Text may hold no half of a character (a lone surrogate, \\ud800 to \\udfff): no file can keep it"
    )
    if scope["path"].startswith("/v1/"):
        return JSONResponse({"error": {"message": message, "type": "BadRequestError", "param": path, "code": 400}}, 400)
    return JSONResponse({"detail": message}, DataError.status)
