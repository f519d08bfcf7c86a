"""Answers that take long: a client that hangs up meanwhile is not waited for, and nothing is made ready for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; nginx and others write it into their logs."""


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, bytes]) -> Response:
    """The answer, which is JSON, unless the client hangs up before it is there: then nobody waits for it any more, and
    it is not made ready to be sent. A client that waits long asks again and again, and each time hangs up."""
    waiting, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return Response(waiting.result(), media_type="application/json")
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        waiting.cancel()
        gone.cancel()
        await asyncio.gather(waiting, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Wait until the client has gone; what it sends meanwhile is of no interest."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
