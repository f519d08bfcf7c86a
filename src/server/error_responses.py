"""How the server's routes answer errors: with the status and the message, never with a traceback."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from src.errors import ClassroomError, DataError
from src.rollout.text import without_surrogates


def add_error_answers(app: FastAPI) -> None:
    """Answer a `ClassroomError` with its status and message, a bad request with what is wrong in it, and any other
    error with its name: the traceback of such a one goes to the log."""
    app.add_exception_handler(ClassroomError, answer_with_message)
    app.add_exception_handler(RequestValidationError, _answer_with_what_is_wrong)
    app.add_exception_handler(Exception, _answer_with_its_name)  # Starlette raises it again, for uvicorn to log


async def answer_with_message(_: Request, error: Exception) -> JSONResponse:
    """The message, with the status of the error's kind."""
    status = error.status if isinstance(error, ClassroomError) else 500
    return JSONResponse({"detail": without_surrogates(str(error))}, status_code=status)


async def _answer_with_what_is_wrong(_: Request, error: Exception) -> JSONResponse:
    """Which field breaks which rule, without the body itself, which may be long."""
    wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return JSONResponse({"detail": "; ".join(wrong[:5])}, status_code=DataError.status)


async def _answer_with_its_name(request: Request, error: Exception) -> JSONResponse:
    where = f"{request.method} {request.url.path}"
    said = without_surrogates(f"{type(error).__name__}: {error}"[:300])
    why = (
        f"The server met an error that it does not expect, in {where}: {said}. It goes on; the traceback is in its log "
        "(server.log in the run folder, if a launcher started it)."
    )
    return JSONResponse({"detail": why}, status_code=500)
