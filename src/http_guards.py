"""What stands before the server's routes: the token, a limit to what a request may hold, and an end to the waiting for
clients that have gone."""

import asyncio
import hmac
from collections.abc import Coroutine
from typing import Any

from fastapi import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from src.access import TOKEN_VARIABLE
from src.api import LARGEST_BODY
from src.errors import AccessDenied, RequestTooLarge

_NO_TOKEN = (
    "This server wants the token that it was started with, as Authorization: Bearer …. The programs of this project "
    f"send what the environment variable {TOKEN_VARIABLE} holds."
)
_TOO_LARGE = f"The body is larger than the {LARGEST_BODY} bytes that this server takes: split the request."

CLIENT_GONE = 499
"""Nobody reads it; nginx and others write it into their logs."""


class TokenRequired:
    """ASGI middleware: a request without the token is answered with 401, whatever its route. Only what `open_paths`
    names may be read without it: the files of the page, which asks for the token itself."""

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


class BodyLimit:
    """ASGI middleware: a body over `LARGEST_BODY` bytes is answered with 413, whether its length was announced or not,
    and never held in memory. (Starlette's own says no more than "Content Too Large".)"""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > LARGEST_BODY:
                raise HTTPException(RequestTooLarge.status, _TOO_LARGE)
            return message

        announced = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if int(announced) > LARGEST_BODY:  # the HTTP parser has seen to it that this is a number
            await JSONResponse({"detail": _TOO_LARGE}, RequestTooLarge.status)(scope, receive, send)
        else:
            await self._app(scope, limited, send)


async def unless_gone(request: Request, answer: Coroutine[Any, Any, bytes]) -> Response:
    """The answer, which is JSON, unless the client hangs up before it is there: then nobody waits for it any more, and
    it is not made ready to be sent. A client that waits long asks again and again, and each time hangs up."""
    waiting, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return Response(waiting.result(), media_type="application/json")
        return Response(status_code=CLIENT_GONE)
    finally:
        waiting.cancel()
        gone.cancel()
        await asyncio.gather(waiting, gone, return_exceptions=True)


async def _hung_up(request: Request) -> None:
    """Wait until the client has gone; what it sends meanwhile is of no interest."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
