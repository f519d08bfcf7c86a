"""The viewer's routes. Those that read files are plain functions, which FastAPI runs in threads, so that they do not
block the event loop in which conversations are played."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response

from classroom_rl.errors import DataError, UnknownConversation
from classroom_rl.judges.verdicts import CRITERIA
from classroom_rl.viewer.chat import ChatTutor
from classroom_rl.viewer.desk import DeskQuery, TeachersDesk
from classroom_rl.viewer.game_table import GameTable
from classroom_rl.viewer.list_index import LARGEST_PAGE, ListQuery
from classroom_rl.viewer.metrics import MAROONED, RunMetrics
from classroom_rl.viewer.reader import LARGEST_GROUP, RunReader
from classroom_rl.viewer.schemas import (
    ChatAvailability,
    ChatBody,
    ChatOpening,
    ChatReply,
    Comparison,
    ConversationView,
    Decided,
    DecisionBody,
    Desk,
    GameBody,
    GameMoment,
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


def add_viewer(app: FastAPI, run_folder: Path, live: bool) -> None:
    """Add the page and its routes to the application. They read the run folder; only decisions at the teacher's desk
    are written to it.

    Args:
        live: whether this server plays conversations. A teacher to talk to is in `app.state.tutor`, a game to join in
            `app.state.table`, if there is one.
    """
    app.state.tutor = app.state.table = None
    add_page(app)
    routes = APIRouter(prefix="/api")
    reader, run_metrics = RunReader(run_folder), RunMetrics(run_folder)
    _add_run_routes(routes, reader, run_metrics, live)
    _add_conversation_routes(routes, reader)
    _add_desk_routes(routes, TeachersDesk(reader))
    _add_chat_routes(routes, run_folder, live)
    app.include_router(routes)


def _add_run_routes(routes: APIRouter, reader: RunReader, run_metrics: RunMetrics, live: bool) -> None:
    @routes.get("/run")
    def run(request: Request) -> RunInfo:
        sets, config = reader.sets(), run_metrics.config()
        return RunInfo(
            name=reader.folder.name,
            folder=str(reader.folder),
            live=live,
            supervised=run_metrics.is_supervised(),
            game=config.get("environment") == MAROONED,
            steps=list(sets.steps),
            evaluations=list(sets.evaluations),
            personas=list((config.get("generation") or {}).get("student_personas_prompts_paths") or {}),
            facts=run_metrics.facts(),
            criteria={name: criterion.top for name, criterion in CRITERIA.items()},
            chat=_chat_availability(request, reader.folder, live),
        )

    @routes.get("/pulse")
    def pulse(request: Request) -> Pulse:
        sets, playing = reader.sets(), reader.playing()
        model: ChatTutor | GameTable | None = request.app.state.tutor or request.app.state.table
        return Pulse(
            shelf=f"{sets.latest_step} {len(sets.steps)} {sets.settled_until()}",
            metrics=run_metrics.stamp(),
            journal=reader.tails.stamp(),
            latest_step=sets.latest_step,
            policy=model.policy if model else reader.tails.policy,
            playing=sum(row.state != "END" for row in playing),
            played=sum(row.state == "END" for row in playing),
            spent_usd=model.spent_usd if model else None,
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


def _add_chat_routes(routes: APIRouter, run_folder: Path, live: bool) -> None:
    def live_model(request: Request, name: str) -> Any:
        """Return the model to talk to or to play with; raise an error that says why there is none."""
        model = getattr(request.app.state, name)
        if model is None:
            raise DataError(_chat_availability(request, run_folder, live).why or OFF_WITHOUT_A_TUTOR)
        return model

    @routes.post("/chat/opening")
    def opening(body: ChatBody, request: Request) -> ChatOpening:
        return live_model(request, "tutor").opening(body)

    @routes.post("/chat")
    async def chat(body: ChatBody, request: Request) -> ChatReply:
        return await live_model(request, "tutor").reply(body)

    @routes.post("/game")
    async def game(body: GameBody, request: Request) -> GameMoment:
        return await live_model(request, "table").play(body)


def _chat_availability(request: Request, run_folder: Path, live: bool) -> ChatAvailability:
    if not live:
        return ChatAvailability(on=False, why=f"{OFF_WITHOUT_A_MODEL}{run_folder}")
    on = (request.app.state.tutor or request.app.state.table) is not None
    return ChatAvailability(on=on, why="" if on else OFF_WITHOUT_A_TUTOR)
