"""The teacher behind OpenAI's API: vLLM's own routes on the engine that is being trained.

They stand on an application of their own, so that vLLM's answers to errors do not become those of our routes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from src.errors import ClassroomError, DeadlineExceeded
from src.rollout.engines import ChatEngine
from src.vllm.engine import VllmEngine

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

TEACHER = "teacher"
POLICY_HEADER = b"x-policy-version"
_LAST_WORDS_S = 5.0


async def add_openai_routes(app: FastAPI, teacher: ChatEngine, load_weights_timeout_s: float) -> None:
    """Mount `/v1/models`, `/v1/chat/completions` and `/v1/completions`, if the teacher is an engine of this server.

    The model is called `teacher`, or by its configured name. An answer takes at most half of `load_weights_timeout_s`,
    so that none can make the publishing of weights fail that waits for it.
    """
    if isinstance(teacher, VllmEngine):
        app.mount("/v1", OnePolicyPerAnswer(await _vllm_app(teacher), teacher, load_weights_timeout_s / 2))


async def _vllm_app(teacher: VllmEngine) -> FastAPI:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
    from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completion
    from vllm.entrypoints.openai.models.api_router import attach_router as attach_models
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    app = FastAPI(openapi_url=None)
    for attach in (attach_chat, attach_completion, attach_models, init_exception_handler):
        attach(app)
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.model = teacher.model_name
    arguments.served_model_name = list(dict.fromkeys([TEACHER, teacher.model_name]))
    engine = _GatedEngine(teacher)
    await init_app_state(engine, app.state, arguments, await engine.get_supported_tasks())
    app.state.openai_serving_chat.default_sampling_params["stop_token_ids"] = teacher.stop_ids
    app.state.server = SimpleNamespace(should_exit=False)  # vLLM's handlers set it; our server watches its engines
    return app


class OnePolicyPerAnswer:
    """ASGI application in front of vLLM's: every answer, streamed ones included, is wholly of one policy, which the
    header `X-Policy-Version` names.

    Requests wait while weights are loaded or the engine sleeps, and weights wait for answers that have begun. Whoever
    asks is a guest of a training: an answer that takes longer than `longest_s` seconds, because it is long or because
    nobody reads it, is cut off.
    """

    def __init__(self, app: ASGIApp, teacher: VllmEngine, longest_s: float):
        self._app = app
        self._teacher = teacher
        self._longest_s = longest_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "root_path": scope["app_root_path"]}  # vLLM's routes spell the /v1 of the mount themselves
        if scope.get("method") != "POST":
            await self._app(scope, receive, _with_policy(send, self._teacher))
            return
        try:
            body = await Request(scope, receive).body()  # before the gate: whoever sends slowly holds up nobody
            async with self._teacher.gate.turn():
                answer = _Answer(body, receive, _with_policy(send, self._teacher), self._longest_s)
                await self._app(scope, answer.receive, answer.send)
        except ClientDisconnect:
            return
        except ClassroomError as error:
            await _refusal(error)(scope, receive, send)
            return
        if answer.cut:
            await answer.end(scope)


class _Answer:
    """One request, its body read already, and its answer, which is cut off when its time is up: vLLM is told that the
    client is gone, so that it ends the work in the engine as well, and hears no more from it."""

    def __init__(self, body: bytes, receive: Receive, send: Send, longest_s: float):
        self._body: bytes | None = body
        self._receive = receive
        self._send = send
        self._longest_s = longest_s
        self._ends = asyncio.get_running_loop().time() + longest_s
        self._begun = False
        self._finished = False
        self._late = False

    @property
    def cut(self) -> bool:
        return self._late and not self._finished

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        try:
            async with asyncio.timeout_at(self._ends):
                return await self._receive()
        except TimeoutError:
            self._late = True
            return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._late:
            return
        self._begun = True
        await self._send(message)
        self._finished = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def end(self, scope: Scope) -> None:
        """Say why it was cut off, as far as somebody listens."""
        refusal = _refusal(
            DeadlineExceeded(
                f"An answer may take {self._longest_s:g} s, half of the server's generation.load_weights_timeout_s, "
                "because new weights wait for it. Ask for fewer tokens, or raise that."
            )
        )
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                if self._begun:
                    event = b"data: " + refusal.body + b"\n\n"
                    await self._send({"type": "http.response.body", "body": event, "more_body": False})
                else:
                    await refusal(scope, self._receive, self._send)
        except TimeoutError:
            return  # uvicorn closes the connection of an answer without an end


class _GatedEngine:
    """The engine as vLLM's routes see it. Each of its answers holds the gate until the engine has done with it, which
    after a client has gone may be later than the end of its request, and is sampled with the current adapter."""

    def __init__(self, teacher: VllmEngine):
        self._teacher = teacher
        self._engine = teacher.client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator["RequestOutput"]:
        with self._teacher.gate.inside():
            kwargs["lora_request"] = self._teacher.adapter
            async with aclosing(self._engine.generate(*args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output


def _with_policy(send: Send, teacher: VllmEngine) -> Send:
    async def send_with_policy(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (POLICY_HEADER, str(teacher.policy).encode())]}
        await send(message)

    return send_with_policy


def _refusal(error: ClassroomError) -> JSONResponse:
    """In the shape of OpenAI's errors."""
    content = {"message": str(error), "type": type(error).__name__, "param": None, "code": error.status}
    return JSONResponse({"error": content}, error.status)
