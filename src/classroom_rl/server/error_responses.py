"""Responses of the server's routes: errors are a status and a message, never a traceback. A long-running response is
dropped if its client disconnects.
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
    """The body of every error response. `detail` says what was given, which rule it breaks, and how to fix it."""

    detail: str


def _error_responses() -> dict[int | str, dict]:
    """Return status → OpenAPI description of the errors that are answered with it."""
    meanings = {400: ["a request that is no HTTP"], 500: ["an error that the server does not expect"]}
    for error in vars(classroom_rl.errors).values():
        if isinstance(error, type) and issubclass(error, ClassroomError) and error is not ClassroomError:
            meanings.setdefault(error.status, []).append((error.__doc__ or "").split(". ")[0].split(" The ")[0])
    return {
        status: {"model": ErrorAnswer, "description": " ".join(" or ".join(texts).split())}
        for status, texts in sorted(meanings.items())
    }


ERROR_RESPONSES = _error_responses()
"""The error responses of every route, for the OpenAPI document."""


def add_error_answers(app: FastAPI) -> None:
    """Answer a `ClassroomError` with its status and message, an invalid request with the fields that are wrong, and any
    other error with its type and message; the traceback of the latter goes to the log."""
    app.add_exception_handler(ClassroomError, answer_with_message)
    app.add_exception_handler(RequestValidationError, _answer_with_invalid_fields)
    # Starlette raises the error again after this handler, and uvicorn logs it.
    app.add_exception_handler(Exception, _answer_with_unexpected_error)


async def answer_with_message(_: Request, error: Exception) -> JSONResponse:
    """A response with the error's message and the status of its class."""
    status = error.status if isinstance(error, ClassroomError) else 500
    return JSONResponse({"detail": without_keys(without_surrogates(str(error)))}, status_code=status)


async def _answer_with_invalid_fields(_: Request, error: Exception) -> JSONResponse:
    """Name the invalid fields and the rules that they break, without the body itself, which may be long."""
    problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    return JSONResponse({"detail": "; ".join(problems[:5])}, status_code=DataError.status)


async def _answer_with_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    route = f"{request.method} {request.url.path}"
    error_text = without_keys(without_surrogates(f"{type(error).__name__}: {error}"))[:300]
    message = (
        f"The server met an error that it does not expect, in {route}: {error_text}. It goes on; the traceback is in "
        "its log (server.log in the run folder, if a launcher started it)."
    )
    return JSONResponse({"detail": message}, status_code=500)


CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client has gone. The client no longer reads it, but proxies log it."""


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, bytes]) -> Response:
    """Await the answer (JSON as bytes) and return it as a response. If the client disconnects first, cancel the answer.

    A waiting client disconnects and repeats its request each time its own timeout passes. Without the cancellation,
    the server would serialise the answer once for each of these requests.
    """
    answer_task, disconnect_task = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((answer_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if answer_task.done():
            return Response(answer_task.result(), media_type="application/json")
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        answer_task.cancel()
        disconnect_task.cancel()
        await asyncio.gather(answer_task, disconnect_task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects; ignore anything it sends meanwhile."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
