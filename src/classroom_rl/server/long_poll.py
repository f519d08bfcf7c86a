"""Long-running responses that are dropped when the client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for it. The client no longer reads it, but proxies log it."""


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, bytes]) -> Response:
    """The answer as a JSON response. If the client disconnects first, the answer's coroutine is cancelled, and so it is
    not serialised in vain: a waiting client repeats its request and disconnects each time its own timeout passes."""
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
    """Wait until the client disconnects; ignore anything it sends meanwhile."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
