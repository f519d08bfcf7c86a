"""The server: the application, its routes and its lifespan, from loading the models to ending their processes."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

from classroom_rl.config.load import record_run
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import NCCL
from classroom_rl.engines.vllm.engine_base import EngineProcess
from classroom_rl.engines.vllm.role_metrics import in_words
from classroom_rl.errors import ClassroomError, ConfigError, EngineFailure, UnknownConversation
from classroom_rl.models.policy_folder import inside_run_folder, policy_path
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.environment import POLICY_ROLE, environment_of, module_of
from classroom_rl.rollout.extensions import OpenServer, extension_of
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.server.agreement import conversation_keys, digest_of
from classroom_rl.server.auth import token_for
from classroom_rl.server.engine_sleep import GpuLease
from classroom_rl.server.error_responses import (
    ERROR_RESPONSES,
    add_error_answers,
    answer_with_message,
    unless_disconnected,
)
from classroom_rl.server.middleware import add_request_checks
from classroom_rl.server.open_models import open_second_judge
from classroom_rl.server.openai_routes import add_openai_routes
from classroom_rl.server.sampling_service import SamplingService, open_service
from classroom_rl.server.schemas import (
    Health,
    LoadWeightsRequest,
    LoadWeightsResponse,
    PlayedResponse,
    ReceiveWeightsRequest,
    RewardRequest,
    RewardResponse,
    SleepRequest,
    SleepResponse,
)
from classroom_rl.server.spans import spans_of_environment
from classroom_rl.system.processes import refuse_taken_port
from classroom_rl.system.run_lock import claim
from classroom_rl.system.startup import large_imports
from classroom_rl.viewer.routes import add_viewer, page_files

if TYPE_CHECKING:
    from classroom_rl.engines.api.call_ledger import CallLedger

logger = logging.getLogger(__name__)

LARGEST_HEAD = 64 * 1024
"""The most bytes that the request line and the headers of a request may have."""
_KEEP_ALIVE_S, _GRACEFUL_SHUTDOWN_S = 75, 5


def uvicorn_options(app: FastAPI, host: str, port: int) -> uvicorn.Config:
    """Return the options with which uvicorn serves an application.

    Headers are read before the token is checked, so their size must be limited. Only the parser h11 does that;
    uvicorn's other parser accepts any number of headers. uvicorn logs through this program's own handler, which removes
    API keys from messages.
    """
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


_SECONDS_BETWEEN_CHECKS = 0.5
_NEVER = 2**31 - 1
"""A threshold that is never reached, so that Python starts no full collection by itself."""
_IDLE_PERIODS_PER_FULL_COLLECTION = 100


async def collect_at_rest(service: SamplingService) -> None:
    """Run garbage collections while the server is idle, until cancelled: a full one in every hundredth idle period, a
    short one in the others. Each also freezes the objects that are alive, such as the last responses, so that later
    collections do not visit them.

    A full collection visits all objects and blocks the event loop meanwhile. Python by itself starts one whenever the
    number of objects has grown by a quarter, which happens several times in a large batch. Playing conversations leaves
    hardly any garbage that only a full collection finds; the collections of young objects, which stay on, find the
    rest.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        idle_periods, collected_at, previous = 0, -1, 0
        while True:
            finished = service.runner.finished
            # Idle: nothing runs, and nothing finished since the last check. Collect once in each idle period.
            if not service.running and finished == previous != collected_at:
                _collect(full=idle_periods % _IDLE_PERIODS_PER_FULL_COLLECTION == 0)
                idle_periods, collected_at = idle_periods + 1, finished
            previous = finished
            await asyncio.sleep(_SECONDS_BETWEEN_CHECKS)
    finally:
        gc.set_threshold(*thresholds)


def _collect(full: bool) -> None:
    if full:
        gc.unfreeze()  # a full collection does not visit frozen objects
    gc.collect(2 if full else 1)
    gc.freeze()


POLICY_VERSION = Gauge("classroom_policy_version", "Version of the teacher weights that are loaded")
RUNNING = Gauge("classroom_running_conversations", "Conversations that are being played")
FINISHED = Gauge("classroom_finished_conversations", "Conversations that finished since the server started")


@cache
def _gauge(role: str, quantity: str, description: str, *labels: str) -> Gauge:
    """Return the Prometheus gauge for the usage of a role behind an API. It is created once per role and quantity."""
    return Gauge(f"classroom_{role}_{quantity}", f"{description} a {role} behind an API", labels)


def serve(config: TrainRLConfig) -> None:
    """Load the models as soon as no trainer uses their GPUs, and serve on `generation.server_host:server_port` until
    interrupted.

    Raises:
        ConfigError: if the port is taken, another server uses the run folder, a prompt template or a model cannot be
            used, or a token is missing.
        DeadlineExceeded: if a trainer uses the GPUs and does not make room.
        EngineFailure: if a model cannot be loaded, or an engine died; a restarted server continues from the journal.
    """
    host, port = config.generation.server_host, config.generation.server_port
    refuse_taken_port(host, port)
    subfolder = server_subfolder(config.generation.server_index)
    with claim("vllm_server", Path(config.logging.save_dir) / subfolder):
        run_folder = record_run(config, "vllm_server", subfolder)
        lease = GpuLease(run_folder, config.generation.server_index)
        lease.wait_for_end(config.generation.sample_timeout_s)
        _run(create_app(config, run_folder), host, port)


def server_subfolder(server_index: int) -> str:
    """Return a server's own subfolder of the run folder, which holds its journal, its ledgers of paid requests and its
    lock. The first server uses the run folder itself, where the weights are published for all servers."""
    return f"server{server_index}" if server_index else "."


def _run(app: FastAPI, host: str, port: int) -> None:
    server = uvicorn.Server(uvicorn_options(app, host, port))
    app.state.end = lambda: setattr(server, "should_exit", True)
    try:
        server.run()
    except SystemExit:  # raised by uvicorn if the application cannot start
        if app.state.failure is None:
            raise
    if app.state.failure is not None and not server.started:
        raise app.state.failure
    if app.state.failure is not None:
        raise EngineFailure(
            f"{app.state.failure} The server has ended. Start it again with the same command: it goes on where it was."
        )


def create_app(config: TrainRLConfig, run_folder: Path) -> FastAPI:
    """Create the application. It loads the models at startup and ends their processes at shutdown. If an engine dies,
    the failure is stored in `app.state.failure` and `app.state.end` is called."""
    server_folder = run_folder / server_subfolder(config.generation.server_index)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with _keep_startup_failure(app), large_imports():  # transformers and vLLM
            service = await open_service(config, reward_weights(config), server_folder)
        service.plays = digest_of(app.state.plays) if app.state.plays is not None else ""
        app.state.service = service
        app.state.models = service.environment.roles
        tasks, closing = [asyncio.create_task(_stop_when_engine_dies(app))], ExitStack()
        try:
            with _keep_startup_failure(app):
                app.state.opened = _open_environment(config, service, server_folder, closing)
                if (spans := spans_of_environment()) is not None:
                    service.journal.on_event, provider = spans[0].take, spans[1]
                    closing.callback(provider.shutdown)
                await service.restore_policy(run_folder, config.generation.load_weights_timeout_s)
            timeout_s = config.generation.load_weights_timeout_s
            roles = service.environment.roles
            await add_openai_routes(app, getattr(roles, POLICY_ROLE, roles.policy), timeout_s)
            address = f"http://{config.generation.server_host}:{config.generation.server_port}"
            tasks.append(asyncio.create_task(collect_at_rest(service)))
            logger.info("the classroom is open on %s, its journal in %s", address, server_folder)
            yield
        finally:
            for task in tasks:
                task.cancel()
            service.engine_sleep.close()
            closing.close()
            service.environment.roles.shutdown()

    app = FastAPI(title="Classroom", lifespan=lifespan, responses=ERROR_RESPONSES)
    app.state.config, app.state.run_folder, app.state.failure = config, run_folder, None
    app.state.plays = conversation_keys(config)  # now, to fingerprint the templates that are about to be read
    add_error_answers(app)
    app.add_exception_handler(EngineFailure, _stop_and_answer)
    add_request_checks(app, token_for(config.generation.server_host), config.generation.allowed_hosts, page_files())
    _add_sampling_routes(app, environment_of(config).Record, module_of(config.environment, "config").REWARD_NAMES)
    _add_weight_routes(app)
    _add_sleep_routes(app)
    _add_status_routes(app)
    add_viewer(app, run_folder, live=True, environment=config.environment)
    return app


def _open_environment(config: TrainRLConfig, service: SamplingService, folder: Path, closing: ExitStack) -> Any:
    """Return what the environment's routes use, if it brings routes."""
    routes = extension_of(config.environment, "routes")
    if routes is None:
        return None

    def open_judge(judge: JudgeModelConfig, ledger_path: Path, role: str) -> tuple[Any, Any]:
        return open_second_judge(judge, config.generation, ledger_path, role)

    longest_reply_s = config.generation.load_weights_timeout_s / 2
    return routes.open_for(OpenServer(config, service, folder, longest_reply_s, open_judge, closing))


@contextmanager
def _keep_startup_failure(app: FastAPI) -> Iterator[None]:
    """Store a startup error for `serve`, which ends with its message; uvicorn would print a traceback."""
    try:
        yield
    except ClassroomError as error:
        app.state.failure = error
        logging.getLogger("uvicorn.error").disabled = True
        raise


async def _stop_when_engine_dies(app: FastAPI) -> None:
    """Check the engines until one has died, then stop the server: only a restart brings an engine back."""
    while True:
        try:
            app.state.service.check_alive()
        except EngineFailure as failure:
            _stop(app, failure)
            return
        except Exception:  # nothing awaits this task, so log the error here
            logger.exception("the engines are no longer checked")
            raise
        await asyncio.sleep(_SECONDS_BETWEEN_CHECKS)


def _stop(app: FastAPI, failure: EngineFailure) -> None:
    if app.state.failure is None:
        logger.error("%s", failure)
        app.state.failure = failure
        app.state.end()


async def _stop_and_answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, EngineFailure):
        _stop(request.app, error)
    return await answer_with_message(request, error)


def _service(request: Request) -> SamplingService:
    return request.app.state.service


def _add_sampling_routes(app: FastAPI, record: type[Trajectory], names: Sequence[str]) -> None:
    @app.post("/sample_conversations", response_model=SampleResponse[record])
    async def sample_conversations(body: SampleRequest, request: Request) -> Response:
        return await unless_disconnected(request, _service(request).sample_as_json(body))

    @app.post("/play_conversations", response_model=PlayedResponse)
    async def play_conversations(body: SampleRequest, request: Request) -> Response:
        return await unless_disconnected(request, _service(request).play_as_json(body))

    @app.get("/wait_batch", response_model=SampleResponse[record])
    async def wait_batch(request_id: str, request: Request) -> Response:
        return await unless_disconnected(request, _service(request).wait_as_json(request_id))

    @app.get("/conversations/{conversation_id}", response_model=record)
    async def conversation(conversation_id: str, request: Request) -> Response:
        return JSONResponse(_service(request).record(conversation_id).model_dump(mode="json"))

    @app.post("/get_{name}_reward")
    async def get_reward(name: str, body: RewardRequest, request: Request) -> RewardResponse:
        if name not in names:
            raise UnknownConversation(f"There is no reward {name}. There are: {', '.join(names)}.")
        service = _service(request)
        return RewardResponse(rewards=[service.reward(name, conversation_id) for conversation_id in body.conversations])


def _add_weight_routes(app: FastAPI) -> None:
    @app.post("/load_weights")
    async def load_weights(body: LoadWeightsRequest, request: Request) -> LoadWeightsResponse:
        folder = inside_run_folder(request.app.state.run_folder, body.path)
        started = time.monotonic()
        policy = PolicyVersion(body.run_id, body.version)
        timeout_s = request.app.state.config.generation.load_weights_timeout_s
        weights = await _service(request).load_policy(folder, policy, timeout_s)
        return LoadWeightsResponse(policy=policy, seconds=time.monotonic() - started, weights=weights)

    @app.post("/weights/receive", response_model=LoadWeightsResponse)
    async def receive_weights(body: ReceiveWeightsRequest, request: Request) -> Response:
        return await unless_disconnected(request, _receive_weights(body, request))

    @app.delete("/weights/receive", status_code=204)
    async def stop_receiving(request: Request) -> None:
        _service(request).stop_receiving()


async def _receive_weights(body: ReceiveWeightsRequest, request: Request) -> bytes:
    """Receive weights, and answer. If it is cancelled because the trainer has gone, the engine counts as dead."""
    started, state = time.monotonic(), request.app.state
    publish_through = state.config.train.publish_through
    if publish_through != NCCL:  # the engine would wait for a sender until its deadline, and start again
        raise ConfigError(
            f"This server was started with train.publish_through={publish_through}: start it with {NCCL}."
        )
    policy, folder = PolicyVersion(body.run_id, body.version), policy_path(state.run_folder, body.version)
    timeout_s = state.config.generation.load_weights_timeout_s
    weights = await _service(request).receive_policy(body.group, body.tensors, policy, folder, timeout_s)
    response = LoadWeightsResponse(policy=policy, seconds=time.monotonic() - started, weights=weights)
    return response.model_dump_json().encode()


def _add_sleep_routes(app: FastAPI) -> None:
    """Add the routes for sleep and wake-up, for a trainer on the same GPUs. Both are idempotent."""

    @app.post("/sleep")
    async def sleep(body: SleepRequest, request: Request) -> SleepResponse:
        started = time.monotonic()
        await _service(request).engine_sleep.sleep(body.borrowers)
        return _sleep_response(request, started)

    @app.post("/wake_up")
    async def wake_up(request: Request) -> SleepResponse:
        started = time.monotonic()
        await _service(request).engine_sleep.wake_up()
        return _sleep_response(request, started)


def _sleep_response(request: Request, started: float) -> SleepResponse:
    engines = _service(request).environment.roles.engines
    asleep = {role: engine.health().asleep for role, engine in engines.items()}
    return SleepResponse(asleep=asleep, seconds=time.monotonic() - started)


def _add_status_routes(app: FastAPI) -> None:
    @app.get("/health")
    async def health(request: Request) -> Health:
        service = _service(request)
        roles = service.environment.roles
        return Health(
            status="ok",
            roles=roles.health(),
            policy=roles.policy.policy,
            run_folder=str(request.app.state.run_folder),
            server_index=request.app.state.config.generation.server_index,
            reward_weights=service.runner.reward_weights,
            plays=request.app.state.plays,
            running_requests=service.running,
            running_conversations=service.runner.running,
            finished_conversations=service.runner.finished,
        )

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        service = _service(request)
        POLICY_VERSION.set(service.environment.roles.policy.policy.version)
        RUNNING.set(service.runner.running)
        FINISHED.set(service.runner.finished)
        for role, api in service.environment.roles.apis.items():
            _set_call_gauges(role, api.ledger)
        engines = service.environment.roles.engines.items()
        engine_metrics = in_words(
            {role: engine.metrics() for role, engine in engines if isinstance(engine, EngineProcess)}
        )
        return Response(generate_latest() + engine_metrics, media_type=CONTENT_TYPE_LATEST)


def _set_call_gauges(role: str, ledger: "CallLedger") -> None:
    calls = _gauge(role, "calls", "Requests of this run to", "model", "outcome")
    for (model, outcome), count in ledger.outcomes.items():
        calls.labels(model, outcome).set(count)
    tokens = _gauge(role, "tokens", "Tokens of this run, by the provider's count, of", "kind")
    tokens.labels("prompt").set(ledger.prompt_tokens)
    tokens.labels("completion").set(ledger.completion_tokens)
    usd = _gauge(role, "usd", "Dollars spent, and held for requests of unknown fate, on", "state")
    usd.labels("spent").set(ledger.spent_usd)
    usd.labels("reserved").set(ledger.reserved_usd)
