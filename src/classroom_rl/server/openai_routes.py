"""OpenAI's API for the teacher: vLLM's own routes, on the engine of the model under training. They are mounted as a
separate application, so that vLLM's error handlers do not apply to our routes.
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

from classroom_rl.engines.vllm.engine import VllmEngine
from classroom_rl.errors import ClassroomError, DeadlineExceeded
from classroom_rl.rollout.engine import ChatEngine

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

TEACHER = "teacher"
POLICY_HEADER = b"x-policy-version"
_SEND_REASON_TIMEOUT_S = 5.0


async def add_openai_routes(app: FastAPI, teacher: ChatEngine, load_weights_timeout_s: float) -> None:
    """Mount `/v1/models`, `/v1/chat/completions` and `/v1/completions`, if the teacher is an engine of this server.

    The model's name in requests is `teacher` or its configured name. A response may take at most half of
    `load_weights_timeout_s`: loading weights waits for responses in flight, and must not time out because of one.
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
    arguments.default_chat_template_kwargs = teacher.chat_template_kwargs
    arguments.served_model_name = list(dict.fromkeys([TEACHER, teacher.model_name]))
    engine = _GatedEngine(teacher)
    await init_app_state(engine, app.state, arguments, await engine.get_supported_tasks())
    _add_model_route(app)
    app.state.openai_serving_chat.default_sampling_params["stop_token_ids"] = teacher.stop_ids
    # vLLM's error handlers set `should_exit` on the server. Ours ignores that, because it checks its engines itself.
    app.state.server = SimpleNamespace(should_exit=False)
    return app


def _add_model_route(app: FastAPI) -> None:
    """OpenAI's route for one model, which vLLM lacks."""

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> JSONResponse:
        models = (await app.state.openai_serving_models.show_available_models()).data
        for card in models:
            if card.id == model:
                return JSONResponse(card.model_dump())
        message = f"The model `{model}` does not exist. Valid aliases: {', '.join(card.id for card in models)}"
        error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
        return JSONResponse({"error": error}, 404)


class OnePolicyPerAnswer:
    """ASGI application around vLLM's. Every response, even a streamed one, comes from one policy version, which the
    header `X-Policy-Version` names.

    Requests wait while weights are loaded or the engine sleeps, and loading weights waits for responses that have
    begun. Training has priority: a response that takes longer than `longest_s` seconds, because it is long or the
    client reads slowly, is cut off.
    """

    def __init__(self, app: ASGIApp, teacher: VllmEngine, longest_s: float):
        self._app = app
        self._teacher = teacher
        self._longest_s = longest_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # vLLM's routes include /v1 themselves: undo the prefix of the mount.
        scope = {**scope, "root_path": scope["app_root_path"]}
        if scope.get("method") != "POST":
            await self._app(scope, receive, _with_policy(send, self._teacher))
            return
        try:
            body = await Request(scope, receive).body()  # read before the gate, so that a slow client does not hold it
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
    """The `receive` and `send` of one request whose body has been read. When the time is up, `receive` tells vLLM that
    the client disconnected, so that vLLM aborts the request in the engine, and `send` drops further messages."""

    def __init__(self, body: bytes, receive: Receive, send: Send, longest_s: float):
        self._body: bytes | None = body
        self._receive = receive
        self._send = send
        self._longest_s = longest_s
        self._deadline = asyncio.get_running_loop().time() + longest_s
        self._started = False
        self._finished = False
        self._timed_out = False

    @property
    def cut(self) -> bool:
        return self._timed_out and not self._finished

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            self._timed_out = True
            return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._timed_out:
            return
        self._started = True
        await self._send(message)
        self._finished = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def end(self, scope: Scope) -> None:
        """Send the reason why the answer was cut off, if the client still reads."""
        refusal = _refusal(
            DeadlineExceeded(
                f"An answer may take {self._longest_s:g} s, half of the server's generation.load_weights_timeout_s, "
                "because new weights wait for it. Ask for fewer tokens, or raise that."
            )
        )
        try:
            async with asyncio.timeout(_SEND_REASON_TIMEOUT_S):
                if self._started:
                    event = b"data: " + refusal.body + b"\n\n"
                    await self._send({"type": "http.response.body", "body": event, "more_body": False})
                else:
                    await refusal(scope, self._receive, self._send)
        except TimeoutError:
            return  # the client does not read; uvicorn closes the connection of an unfinished answer


class _GatedEngine:
    """The engine that vLLM's routes use. Each response is sampled with the current adapter and holds the gate until the
    engine has finished it, which after a disconnect may be later than the end of the request."""

    def __init__(self, teacher: VllmEngine):
        self._teacher = teacher
        self._engine = teacher.client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: "SamplingParams", *args: Any, **kwargs: Any
    ) -> AsyncIterator["RequestOutput"]:
        if sampling_params.ignore_eos:
            # The teacher's end tokens were added to the defaults (`_vllm_app`), which `ignore_eos` does not undo.
            end_ids, stop_ids = set(self._teacher.stop_ids), sampling_params.stop_token_ids or ()
            sampling_params.stop_token_ids = [token_id for token_id in stop_ids if token_id not in end_ids]
        with self._teacher.gate.inside():
            kwargs["lora_request"] = self._teacher.adapter
            async with aclosing(self._engine.generate(prompt, sampling_params, *args, **kwargs)) as outputs:
                async for output in outputs:
                    if sampling_params.structured_outputs is not None:
                        _refuse_failed_grammar(output)
                    yield output


def _refuse_failed_grammar(output: "RequestOutput") -> None:
    """Refuse a grammar on which the engine failed. The engine checks a grammar's syntax beforehand, so this one matches
    no text: a rule or schema that only refers to itself. vLLM would answer "Internal server error"."""
    from vllm.exceptions import VLLMValidationError

    if any(completion.finish_reason == "error" for completion in output.outputs):
        raise VLLMValidationError(
            "The engine found no text that fits the grammar or schema of this request. A rule that only refers to "
            'itself, such as `root ::= root` or {"$ref": "#"}, has no end: give it another branch.',
            parameter="structured_outputs",
        )


def _with_policy(send: Send, teacher: VllmEngine) -> Send:
    """Wrap `send` so that the response has the policy header."""

    async def send_with_policy(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (POLICY_HEADER, str(teacher.policy).encode())]}
        await send(message)

    return send_with_policy


def _refusal(error: ClassroomError) -> JSONResponse:
    """Return an error response in OpenAI's form."""
    content = {"message": str(error), "type": type(error).__name__, "param": None, "code": error.status}
    return JSONResponse({"error": content}, error.status)
