"""Responses of the server's routes: errors as a status and a message, never a traceback, and long-running ones that are
dropped when the client disconnects.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

import classroom_rl.errors
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.rollout.text import without_surrogates
from classroom_rl.system.keys import without_keys


class ErrorAnswer(BaseModel):
    """The body of every error response: what was given, the rule, and the fix."""

    detail: str


def _documented() -> dict[int | str, dict]:
    """By status: which errors are answered with it."""
    meanings = {400: ["a request that is no HTTP"], 500: ["an error that the server does not expect"]}
    for error in vars(classroom_rl.errors).values():
        if isinstance(error, type) and issubclass(error, ClassroomError) and error is not ClassroomError:
            meanings.setdefault(error.status, []).append((error.__doc__ or "").split(". ")[0].split(" The ")[0])
    return {
        status: {"model": ErrorAnswer, "description": " ".join(" or ".join(texts).split())}
        for status, texts in sorted(meanings.items())
    }


ERROR_RESPONSES = _documented()
"""The error responses of every route, for the OpenAPI document."""


def add_error_answers(app: FastAPI) -> None:
    """Answer a `ClassroomError` with its status and message, an invalid request with the fields that are wrong, and any
    other error with its type and message; the traceback of the latter goes to the log."""
    app.add_exception_handler(ClassroomError, answer_with_message)
    app.add_exception_handler(RequestValidationError, _answer_with_what_is_wrong)
    app.add_exception_handler(Exception, _answer_with_its_name)  # Starlette raises it again, for uvicorn to log


async def answer_with_message(_: Request, error: Exception) -> JSONResponse:
    """A response with the error's message and the status of its class."""
    status = error.status if isinstance(error, ClassroomError) else 500
    return JSONResponse({"detail": without_keys(without_surrogates(str(error)))}, status_code=status)


async def _answer_with_what_is_wrong(_: Request, error: Exception) -> JSONResponse:
    """The fields and the rules they break, without the body itself, which may be long."""
    wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return JSONResponse({"detail": "; ".join(wrong[:5])}, status_code=DataError.status)


async def _answer_with_its_name(request: Request, error: Exception) -> JSONResponse:
    where = f"{request.method} {request.url.path}"
    said = without_keys(without_surrogates(f"{type(error).__name__}: {error}"))[:300]
    why = (
        f"The server met an error that it does not expect, in {where}: {said}. It goes on; the traceback is in its log "
        "(server.log in the run folder, if a launcher started it)."
    )
    return JSONResponse({"detail": why}, status_code=500)


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
