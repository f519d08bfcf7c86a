"""The viewer's routes: check, read, reply. They are plain functions, so that reading files holds up no conversation."""

from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, FastAPI, Query, Request

from src.classroom.verdicts import CRITERIA
from src.errors import DataError
from src.viewer.chat import Tutor
from src.viewer.filters import LARGEST_PAGE, Choice
from src.viewer.metrics import Progress
from src.viewer.reader import LARGEST_GROUP, RunReader
from src.viewer.schemas import (
    ChatOpening,
    ChatReply,
    ChatRequest,
    ChatSwitch,
    Comparison,
    ConversationView,
    Group,
    Guards,
    Lessons,
    Metrics,
    Page,
    Pulse,
    RunInfo,
    Tokens,
)
from src.viewer.static_files import add_page

OFF_WITHOUT_A_MODEL = (
    "This page shows what a run left; no model is loaded. Start the server on the same folder to talk to its tutor: "
    "python vllm_server.py --config-name … logging.save_dir="
)
OFF_WHILE_LOADING = "The server is loading its models."


def add_viewer(app: FastAPI, run_folder: Path, live: bool) -> None:
    """The page and its routes.

    Args:
        live: whether this server has a teacher, which is in `app.state.tutor` once it is loaded.
    """
    app.state.tutor = None
    add_page(app)
    routes = APIRouter(prefix="/api")
    reader, progress = RunReader(run_folder), Progress(run_folder)
    _add_run_routes(routes, reader, progress, live)
    _add_conversation_routes(routes, reader)
    _add_chat_routes(routes, run_folder, live)
    app.include_router(routes)


def _add_run_routes(routes: APIRouter, reader: RunReader, progress: Progress, live: bool) -> None:
    @routes.get("/run")
    def run(request: Request) -> RunInfo:
        shelf, config = reader.shelf(), progress.config()
        return RunInfo(
            name=reader.folder.name,
            folder=str(reader.folder),
            live=live,
            steps=list(shelf.steps),
            evaluations=list(shelf.evaluations),
            personas=list((config.get("generation") or {}).get("student_personas_prompts_paths") or {}),
            facts=progress.facts(),
            criteria={name: criterion.top for name, criterion in CRITERIA.items()},
            chat=_chat_switch(request, reader.folder, live),
        )

    @routes.get("/pulse")
    def pulse(request: Request) -> Pulse:
        shelf, playing = reader.shelf(), reader.playing()
        tutor: Tutor | None = request.app.state.tutor
        return Pulse(
            shelf=f"{shelf.latest_step} {len(shelf.steps)} {shelf.settled_until()}",
            metrics=progress.stamp(),
            journal=reader.tails.stamp(),
            latest_step=shelf.latest_step,
            policy=tutor.policy if tutor else reader.tails.policy,
            playing=sum(row.state != "END" for row in playing),
            played=sum(row.state == "END" for row in playing),
            spent_usd=tutor.spent_usd if tutor else None,
        )

    @routes.get("/metrics")
    def metrics() -> Metrics:
        return progress.metrics(reader.shelf())

    @routes.get("/guards")
    def guards() -> Guards:
        return progress.guards()


def _add_conversation_routes(routes: APIRouter, reader: RunReader) -> None:
    @routes.get("/conversations")
    def conversations(choice: Annotated[Choice, Query()]) -> Page:
        return reader.page(choice)

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


def _add_chat_routes(routes: APIRouter, run_folder: Path, live: bool) -> None:
    def tutor(request: Request) -> Tutor:
        switch = _chat_switch(request, run_folder, live)
        if not switch.on:
            raise DataError(switch.why)
        return request.app.state.tutor

    @routes.post("/chat/opening")
    def opening(body: ChatRequest, request: Request) -> ChatOpening:
        return tutor(request).opening(body)

    @routes.post("/chat")
    async def chat(body: ChatRequest, request: Request) -> ChatReply:
        return await tutor(request).reply(body)


def _chat_switch(request: Request, run_folder: Path, live: bool) -> ChatSwitch:
    if not live:
        return ChatSwitch(on=False, why=f"{OFF_WITHOUT_A_MODEL}{run_folder}")
    on = request.app.state.tutor is not None
    return ChatSwitch(on=on, why="" if on else OFF_WHILE_LOADING)
