"""ASGI middleware before the server's routes: checks the host's name, the token, and the request's body."""

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
_NAMES = (b"host", b"origin")
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def add_request_checks(
    app: FastAPI, token: str | None, allowed_hosts: Collection[str] = (), open_paths: Collection[str] = ()
) -> None:
    """Add the checks to every route, including those of mounted applications and websockets.

    Args:
        token: the token that a request must carry. A server without one listens to this machine only, but every web
            page in a browser on this machine could send it requests: `HostCheck` refuses those.
        allowed_hosts: hostnames besides localhost under which a server without a token answers.
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

    A foreign page can have its own name resolve to this machine (DNS rebinding), and then reads and writes as if it
    came from here; its requests carry that name in Host. Or it sends requests here without reading the answers; those
    carry its name in Origin. Programs send no Origin.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str] = ()):
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = None if scope["type"] == "lifespan" else self._why_not(scope["headers"])
        if why is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"detail": why}, ForeignRequest.status)(scope, receive, send)

    def _why_not(self, headers: Collection[tuple[bytes, bytes]]) -> str | None:
        """The reason to refuse a request; None to let it through."""
        hosts, origins = ([value.decode("latin-1") for name, value in headers if name == wanted] for wanted in _NAMES)
        host = hosts[0] if len(hosts) == 1 else " and ".join(hosts)
        if not self._is_own(host):
            return (
                f"This server has no token and answers under the name localhost, under an IP address and under the "
                f"names in generation.allowed_hosts, not under {host[:200]!r}. Open it as http://127.0.0.1:…, add the "
                f"name there, or start the server with a token in {TOKEN_VARIABLE}."
            )
        for origin in origins:
            named = origin.lower().removeprefix("http://").removeprefix("https://")
            if named != host.lower() and _name_in(named) not in self._allowed:
                return (
                    f"This server has no token and answers its own page and programs, not a page of {origin[:200]!r}. "
                    "Add its host to generation.allowed_hosts if it is yours."
                )
        return None

    def _is_own(self, host: str) -> bool:
        """Whether a Host header holds localhost, an IP address or an allowed name: none of these depends on DNS."""
        name = _name_in(host)
        try:
            return name == "localhost" or name in self._allowed or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _name_in(host: str) -> str:
    """The name or address in a Host header, in lower case; empty if the header is malformed."""
    found = _HOST.fullmatch(host)
    return found[1].lower().strip("[]") if found else ""


class TokenRequired:
    """ASGI middleware: answers requests without the token with 401, on every route. Only `open_paths` can be read
    without it: the files of the page, which asks the user for the token."""

    def __init__(self, app: ASGIApp, token: str, open_paths: frozenset[str] = frozenset()):
        self._app = app
        self._open_paths = open_paths
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or self._is_open(scope) or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        else:
            refusal = JSONResponse({"detail": _NO_TOKEN}, AccessDenied.status, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope.get("method") == "GET" and scope.get("path") in self._open_paths


class BodyCheck:
    """ASGI middleware: reads and checks a request's body before its route.

    A body of more than `LARGEST_BODY` bytes is answered with 413, with or without a Content-Length, and is never held
    in memory as a whole. A body whose JSON holds a lone surrogate (half a character) anywhere is answered with 422,
    because no file can store it.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        body = None  # the HTTP parser has checked that the announced length is a number
        if int(announced) <= LARGEST_BODY:
            body, receive = await _read(receive)
        if body is None:
            await JSONResponse({"detail": _TOO_LARGE}, RequestTooLarge.status)(scope, receive, send)
        elif _MAY_BE_SURROGATE.search(body) and (where := _surrogate_in(body)):
            await _half_a_character(scope, where)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _read(receive: Receive) -> tuple[bytes | None, Receive]:
    """The whole body (None if it is too large), and a `receive` that gives the route the same messages again. If the
    client disconnects in the middle, the body is the part that arrived, and the route gets the disconnect."""
    read: list[Message] = []
    size = 0
    while not read or read[-1].get("more_body", False):
        read.append(await receive())
        size += len(read[-1].get("body", b""))
        if size > LARGEST_BODY:
            return None, receive
    body = b"".join(message.get("body", b"") for message in read)
    left = [message for message in read if message["type"] == "http.disconnect"]
    again = left or [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return again.pop(0) if again else await receive()

    return body, receive_again


def _surrogate_in(body: bytes) -> str | None:
    """The path of field names and list indices to a lone surrogate in a JSON body; None if it has none, or is not
    JSON."""
    try:
        waiting: list[tuple[str, Any]] = [("body", json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, str) and has_surrogates(value):
            return without_surrogates(where)
        if isinstance(value, dict):
            waiting += [(f"{where}.{name}", inner) for name, inner in value.items()]
            waiting += [(f"{where}.{name}", name) for name in value]
        elif isinstance(value, list):
            waiting += [(f"{where}.{place}", inner) for place, inner in enumerate(value)]
    return None


def _half_a_character(scope: Scope, where: str) -> JSONResponse:
    """The error response, in the same form as the route's other errors."""
    why = f"{where}: Text may hold no half of a character (a lone surrogate, \\ud800 to \\udfff): no file can keep it"
    if scope["path"].startswith("/v1/"):
        return JSONResponse({"error": {"message": why, "type": "BadRequestError", "param": where, "code": 400}}, 400)
    return JSONResponse({"detail": why}, DataError.status)
