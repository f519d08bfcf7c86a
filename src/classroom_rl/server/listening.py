"""How the server listens: the limits of an HTTP connection."""

from typing import TYPE_CHECKING

from fastapi import FastAPI

if TYPE_CHECKING:
    import uvicorn

LARGEST_HEAD = 64 * 1024
"""The most bytes of a request's line and headers."""
_KEEP_ALIVE_S, _GRACEFUL_SHUTDOWN_S = 75, 5


def uvicorn_options(app: FastAPI, host: str, port: int) -> "uvicorn.Config":
    """How uvicorn serves an application.

    Headers are read before the token is checked, so their size is limited: by h11, since uvicorn's other parser takes
    any number of them. uvicorn logs through this program's own handler, which takes keys out of messages.
    """
    import uvicorn

    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http="h11",
        h11_max_incomplete_event_size=LARGEST_HEAD,
        log_level="warning",
        log_config=None,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_S,
    )
