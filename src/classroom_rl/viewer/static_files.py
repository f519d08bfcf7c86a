"""Serves the page's files, with headers that keep the page from loading anything else."""

import hashlib
from functools import cache
from pathlib import Path

from fastapi import FastAPI, Request, Response

from classroom_rl.errors import UnknownConversation

STATIC = Path(__file__).with_name("static")
MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of every file. `require-trusted-types-for` makes the browser refuse innerHTML."""


@cache
def page_files() -> dict[str, Path]:
    """URL path → file. Only these files are served, and they need no token."""
    files = {f"/viewer/{path.name}": path for path in sorted(STATIC.iterdir()) if path.suffix in MEDIA}
    return files | {"/": STATIC / "index.html"}


def add_page(app: FastAPI) -> None:
    """Add the routes `GET /` and `GET /viewer/…` to the application."""

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _answer(request, page_files()["/"])

    @app.get("/viewer/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        path = page_files().get(f"/viewer/{name}")
        if path is None:
            raise UnknownConversation(f"The page has no file {name!r}.")
        return _answer(request, path)


def _answer(request: Request, path: Path) -> Response:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA[path.suffix], headers=headers)
