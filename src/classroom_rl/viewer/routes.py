"""The viewer's routes. Those that read files are plain functions, which FastAPI runs in threads, so that they do not
block the event loop in which conversations are played."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response

from classroom_rl.errors import DataError, UnknownConversation
from classroom_rl.judges.verdicts import CRITERIA
from classroom_rl.rollout.environment import LoadedModels
from classroom_rl.rollout.extensions import RunView, extension_of, view_of
from classroom_rl.viewer.desk import DeskQuery, TeachersDesk
from classroom_rl.viewer.list_index import LARGEST_PAGE, ListQuery
from classroom_rl.viewer.metrics import RunMetrics
from classroom_rl.viewer.reader import LARGEST_GROUP, RunReader
from classroom_rl.viewer.schemas import (
    ChatAvailability,
    Comparison,
    ConversationView,
    Decided,
    DecisionBody,
    Desk,
    Group,
    Guards,
    Lessons,
    Metrics,
    Page,
    Pulse,
    RunInfo,
    Tokens,
)

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
    """Return URL path → file. Only these files are served, and they need no token."""
    files = {f"/viewer/{path.name}": path for path in sorted(STATIC.iterdir()) if path.suffix in MEDIA}
    return files | {"/": STATIC / "index.html"}


def add_page(app: FastAPI) -> None:
    """Add the routes `GET /` and `GET /viewer/…` to the application."""

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _file_response(request, page_files()["/"])

    @app.get("/viewer/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        path = page_files().get(f"/viewer/{name}")
        if path is None:
            raise UnknownConversation(f"The page has no file {name!r}.")
        return _file_response(request, path)


def _file_response(request: Request, path: Path) -> Response:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA[path.suffix], headers=headers)


OFF_WITHOUT_A_MODEL = (
    "This page shows what a run left; no model is loaded. Start the server on the same folder to talk to its tutor: "
    "python vllm_server.py --config-name … logging.save_dir="
)
OFF_WITHOUT_A_TUTOR = "This environment has no tutor to talk to."


def add_viewer(app: FastAPI, run_folder: Path, live: bool, environment: str | None = None) -> None:
    """Add the page and its routes to the application, and the environment's own routes. They read the run folder; only
    decisions at the teacher's desk are written to it.

    Args:
        live: whether this server plays conversations. Then its models are in `app.state.models`, and what the
            environment's `open_for` returned is in `app.state.opened`, once both are there.
        environment: the environment's name; None for the one in the recorded configuration.
    """
    app.state.models = app.state.opened = None
    add_page(app)
    routes = APIRouter(prefix="/api")
    reader, run_metrics = RunReader(run_folder), RunMetrics(run_folder)
    _add_run_routes(routes, reader, run_metrics, live)
    _add_conversation_routes(routes, reader)
    _add_desk_routes(routes, TeachersDesk(reader))
    app.include_router(routes)
    extension = extension_of(environment or run_metrics.config().get("environment") or "classroom", "routes")
    if extension is not None:
        routes = APIRouter()
        extension.add_routes(routes, lambda: _opened(app, run_folder))
        app.include_router(routes)


def _opened(app: FastAPI, run_folder: Path) -> Any:
    """Return what the environment's `open_for` returned.

    Raises:
        DataError: if no model is loaded.
    """
    if app.state.opened is None:
        raise DataError(f"{OFF_WITHOUT_A_MODEL}{run_folder}")
    return app.state.opened


def _add_run_routes(routes: APIRouter, reader: RunReader, run_metrics: RunMetrics, live: bool) -> None:
    @routes.get("/run")
    def run() -> RunInfo:
        sets, config = reader.sets(), run_metrics.config()
        run_view = view_of(config)
        return RunInfo(
            name=reader.folder.name,
            folder=str(reader.folder),
            live=live,
            supervised=run_metrics.is_supervised(),
            game=run_view.live_tab == "game",
            steps=list(sets.steps),
            evaluations=list(sets.evaluations),
            personas=list(run_view.personas(config)),
            facts=run_metrics.facts(),
            criteria={name: criterion.top for name, criterion in CRITERIA.items()},
            chat=_chat_availability(run_view, reader.folder, live),
        )

    @routes.get("/pulse")
    def pulse(request: Request) -> Pulse:
        sets, playing = reader.sets(), reader.playing()
        models: LoadedModels | None = request.app.state.models
        return Pulse(
            shelf=f"{sets.latest_step} {len(sets.steps)} {sets.settled_until()}",
            metrics=run_metrics.stamp(),
            journal=reader.tails.stamp(),
            latest_step=sets.latest_step,
            policy=str(models.policy.policy) if models else reader.tails.policy,
            playing=sum(row.state != "END" for row in playing),
            played=sum(row.state == "END" for row in playing),
            spent_usd=models.spent_usd if models else None,
        )

    @routes.get("/metrics")
    def metrics() -> Metrics:
        return run_metrics.metrics(reader.sets())

    @routes.get("/guards")
    def guards() -> Guards:
        return run_metrics.guards()


def _add_conversation_routes(routes: APIRouter, reader: RunReader) -> None:
    @routes.get("/conversations")
    def conversations(query: Annotated[ListQuery, Query()]) -> Page:
        return reader.page(query)

    @routes.get("/conversation")
    def conversation(where: str, id: str) -> ConversationView:
        return reader.conversation(where, id)

    @routes.get("/tokens")
    def tokens(where: str, id: str) -> Tokens:
        return reader.tokens(where, id)

    @routes.get("/group")
    def group(
        where: str,
        problem_id: str,
        sampling: str = "",
        limit: Annotated[int, Query(ge=1, le=LARGEST_GROUP)] = LARGEST_GROUP,
    ) -> Group:
        return reader.group(where, problem_id, sampling, limit)

    @routes.get("/compare")
    def compare(
        left: str,
        right: str,
        sampling: str = "",
        sort: Literal["played", "risen", "fallen"] = "played",
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = 50,
    ) -> Comparison:
        return reader.compare(left, right, sampling, sort, offset, limit)

    @routes.get("/lessons")
    def lessons(
        where: str, text: str = "", limit: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = LARGEST_PAGE
    ) -> Lessons:
        return reader.lessons(where, text, limit)

    @routes.get("/problem")
    def problem(where: str, problem_id: str) -> dict[str, str]:
        return {"problem_id": problem_id, "problem": reader.problem(where, problem_id)}


def _add_desk_routes(routes: APIRouter, desk: TeachersDesk) -> None:
    @routes.get("/corrections")
    def corrections(query: Annotated[DeskQuery, Query()]) -> Desk:
        return desk.page(query)

    @routes.post("/corrections/decision")
    def decide(body: DecisionBody) -> Decided:
        return desk.decide(body)


def _chat_availability(run_view: RunView, run_folder: Path, live: bool) -> ChatAvailability:
    if not live:
        return ChatAvailability(on=False, why=f"{OFF_WITHOUT_A_MODEL}{run_folder}")
    on = bool(run_view.live_tab)
    return ChatAvailability(on=on, why="" if on else OFF_WITHOUT_A_TUTOR)
