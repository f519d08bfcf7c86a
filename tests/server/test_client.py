"""A server that dies while a trainer uses its GPU, and weights that were loaded only in part. The recording engines of
test_shared_gpus.py replace vLLM; everything from the routes to the optimizer's step is real."""

import asyncio
import json
import logging
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from fastapi import FastAPI

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import (
    AccessDenied,
    ClassroomError,
    ConfigError,
    DeadlineExceeded,
    EngineFailure,
    RequestTooLarge,
    UnknownConversation,
)
from classroom_rl.models.policy_folder import policy_path, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import Usage
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.store.journal import read_journal
from classroom_rl.server.app import serve
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.server.client import ClassroomClient
from classroom_rl.server.engine_sleep import GpuLease, this_process
from classroom_rl.server.schemas import LARGEST_BODY, ProcessId
from classroom_rl.system.run_lock import claim
from classroom_rl.trainer.servers import AssignedServer
from classroom_rl.trainer.session import connect
from tests.conftest import free_port, quickstart_overrides
from tests.server.conftest import BODY, TOKEN, id_of
from tests.server.test_engine_sleep import RecordingEngine, in_order, no_openai_routes
from tests.support.configs import training
from tests.support.scripted_room import SCORES, Room, ScriptedJudge, serving
from tests.support.waiting import wait_until


def test_a_server_at_work_is_told_from_one_that_is_not_there() -> None:
    """One socket takes the request and never answers, as during a long batch; then nobody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        client = ClassroomClient(f"http://127.0.0.1:{port}")
        with pytest.raises(DeadlineExceeded, match="took the request and has no answer to it yet"):
            client._request("GET", "/health", timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match="does not answer"):
        client._request("GET", "/health", timeout_s=0.2)


def test_server_that_is_not_there_is_named_with_the_command_that_starts_one(tmp_path: Path) -> None:
    client = ClassroomClient("http://127.0.0.1:9", log=tmp_path / "server.log")
    with pytest.raises(DeadlineExceeded, match=r"python vllm_server.py --config-name …$"):
        client.wait_until_up(0.0)
    (tmp_path / "server.log").touch()
    with pytest.raises(DeadlineExceeded, match=r"python vllm_server.py .*/server.log"):
        client.wait_until_up(0.0)
    with pytest.raises(EngineFailure, match="ended while it was loading"):
        client.wait_until_up(60.0, alive=lambda: False)


def test_a_lease_is_held_from_taking_to_ending_and_each_server_has_its_own(tmp_path: Path) -> None:
    first, second = GpuLease(tmp_path), GpuLease(tmp_path, 1)
    with claim("train_rl", tmp_path):
        assert first.holders() == []
        first.take([this_process()])
        assert GpuLease(tmp_path).holders() == [this_process()] and second.holders() == []
        first.end()
        first.end()
        assert first.holders() == []


def test_a_dead_trainer_holds_no_lease(tmp_path: Path, trainer: subprocess.Popen) -> None:
    lease = GpuLease(tmp_path)
    lease.take([id_of(trainer)])
    with claim("train_rl", tmp_path):
        assert lease.holders() == [id_of(trainer)]
        trainer.kill()  # and nobody waits for it: it is left as a zombie
        wait_until(lambda: lease.holders() == [])
    lease.take([ProcessId(host="a container that is gone", pid=1, started=0.0)])
    assert lease.holders() == [], "nobody has the run folder's lock"
    with claim("train_rl", tmp_path):
        assert len(lease.holders()) == 1, "what runs on another machine cannot be looked at"


def test_the_wait_for_the_trainer_has_a_deadline_that_names_it(tmp_path: Path, trainer: subprocess.Popen) -> None:
    lease = GpuLease(tmp_path)
    lease.take([id_of(trainer)])
    with claim("train_rl", tmp_path):
        message = rf"process {trainer.pid} on .*generation.sample_timeout_s = 0.2 s, so no engine was loaded"
        with pytest.raises(DeadlineExceeded, match=message):
            lease.wait_for_end(0.2)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}', "[[]]"])
def test_a_damaged_lease_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "gpu_lease.json").write_text(text)
    with pytest.raises(ConfigError, match=r"gpu_lease\.json is damaged .*Remove it if no trainer runs"):
        GpuLease(tmp_path).holders()


class KeptServer:
    """`serve`, started again whenever it ends, on recording engines; `ended` holds what each one ended with."""

    def __init__(self, config: TrainRLConfig, tokenizer: object, monkeypatch: pytest.MonkeyPatch):
        self.config, self.events, self.ended = config, [], []
        self.engines: list[RecordingEngine] = []
        self.restarts = True
        self._tokenizer = tokenizer
        monkeypatch.setattr("classroom_rl.engines.vllm.engine.load_engine", lambda *_, runner: self._load())
        monkeypatch.setattr("classroom_rl.server.app.add_openai_routes", no_openai_routes)
        monkeypatch.setattr("classroom_rl.server.engine_sleep._SECONDS_BETWEEN_TRAINER_CHECKS", 0.02)
        self.client = ClassroomClient(f"http://127.0.0.1:{config.generation.server_port}")
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Have the present server end, as one ends whose engine dies; returns when it has."""
        count = len(self.ended)
        self.events.append("the server dies")
        self.engines[-1].errored = True
        wait_until(lambda: len(self.ended) > count)

    def close(self) -> None:
        self.restarts = False
        if self._thread.is_alive():
            self.engines[-1].errored = True
        self._thread.join(120)

    def _load(self) -> RecordingEngine:
        name = ("teacher", "student")[len(self.engines) % 2]
        self.events.append(f"{name}: loaded")
        self.engines.append(RecordingEngine(name, self._tokenizer, self.events))
        self.engines[-1].dead_error = "killed by the test"
        return self.engines[-1]

    def _keep(self) -> None:
        while self.restarts:
            try:
                serve(self.config)
            except ClassroomError as error:
                self.ended.append(error)


Kept = Callable[..., KeptServer]


@pytest.fixture
def keep_server(world: Path, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    servers: list[KeptServer] = []

    def keep(*overrides: str) -> KeptServer:
        arguments = quickstart_overrides(tmp_path, world / "blank", world, free_port())
        config = training(*arguments, *overrides)
        servers.append(KeptServer(config, tokenizer, monkeypatch))
        return servers[-1]

    yield keep
    for server in servers:
        server.close()


LOADED = ["teacher: loaded", "student: loaded"]
ASLEEP = ["teacher: sleep 1", "student: sleep 1"]
ROOM = "the trainer makes room"


def test_a_server_that_dies_under_a_stepping_trainer_comes_back_when_the_trainer_makes_room(keep_server, monkeypatch):
    """It dies once in an optimizer step, and once between the rollout and the step, which needs no server: the rewards
    came with the rollout."""
    from classroom_rl.trainer import run

    server = keep_server("generation.colocate=true", "train.max_steps=2")
    server.client.wait_until_up(60)
    events = server.events

    class Steps(run.GRPOMetricsCallback):
        def on_optimizer_step(self, arguments, state, *others, **named):
            if state.global_step == 0:
                server.kill()
            events.append("step")

    lost = []
    loss_of = run.TrainingLoop.loss_of

    def loss_without_the_server(self, *arguments):
        if self.state.global_step == 1 and not lost:
            lost.append(server.kill())
        return loss_of(self, *arguments)

    monkeypatch.setattr(run, "GRPOMetricsCallback", Steps)
    monkeypatch.setattr(run.TrainingLoop, "loss_of", loss_without_the_server)
    monkeypatch.setattr(
        "classroom_rl.trainer.servers.clear_device_cache", lambda garbage_collection: events.append(ROOM)
    )
    run.train(server.config)
    load_policy = "teacher: load_policy, awake: kv_cache, weights"
    loaded_again = [*LOADED, load_policy]
    assert in_order(events) == [
        *(*LOADED, *ASLEEP, ROOM),
        *("teacher: wake weights", "teacher: load_policy, awake: weights", "teacher: wake kv_cache"),
        *(ROOM, "student: wake all", "turns", *ASLEEP, "the server dies", "step"),
        *(ROOM, *loaded_again, ROOM, "turns", *ASLEEP, "the server dies", "step"),
        *(ROOM, *loaded_again, ROOM),
    ]
    assert len(server.ended) == 2 and server.client.health().policy.version == 2
    assert not (Path(server.config.logging.save_dir) / "gpu_lease.json").exists()


def test_a_server_that_is_started_beside_a_stepping_trainer_waits_and_loads_when_that_dies(
    keep_server, tmp_path, trainer, monkeypatch
):
    GpuLease(tmp_path).take([id_of(trainer)])
    checks, holders = [], GpuLease.holders
    monkeypatch.setattr(GpuLease, "holders", lambda self: (checks.append(1), holders(self))[1])
    lock = claim("train_rl", tmp_path)
    server = keep_server()
    wait_until(lambda: len(checks) > 5)
    assert server.events == []
    trainer.kill()
    server.client.wait_until_up(60)
    assert server.events == LOADED
    lock.close()


def publish(folder: Path, world: Path, version: int) -> Path:
    path, policy = policy_path(folder, version), PolicyVersion("run", version)
    write_policy(path, policy, lambda target: shutil.copytree(world / "blank", target, dirs_exist_ok=True))
    return path


@pytest.mark.parametrize("asleep", [False, True])
def test_weights_that_were_loaded_half_end_the_server_and_no_turn_is_sampled_from_them(
    keep_server, world, tmp_path, asleep, monkeypatch
):
    server = keep_server()
    server.client.wait_until_up(60)
    server.client.load_weights(PolicyVersion("run", 1), publish(tmp_path, world, 1))
    half = publish(tmp_path, world, 2)
    if asleep:
        server.client.sleep([this_process()])
    teacher = server.engines[0]
    rpc = teacher.collective_rpc

    async def fail_half_way(method: str, args: tuple = ()) -> list:
        if method != "load_policy":
            return await rpc(method, args)
        server.events.append("half of the weights are loaded")
        raise Exception("Call to collective_rpc method failed: CUDA error: out of memory")  # as vLLM has it

    monkeypatch.setattr(teacher, "collective_rpc", fail_half_way)
    monkeypatch.setattr(
        "classroom_rl.server.client.time",
        SimpleNamespace(**{**vars(__import__("time")), "sleep": lambda seconds: None}),
    )
    loaded = server.client.load_weights(PolicyVersion("run", 2), half)
    assert loaded.policy == PolicyVersion("run", 2), "the trainer asked again until a new server had loaded them whole"
    assert len(server.ended) == 1 and isinstance(server.ended[0], EngineFailure)
    message = str(server.ended[0])
    assert "failed while it loaded policy run v2, and may hold parts of the old weights and of the new ones" in message
    assert "CUDA error: out of memory" in message and "Start it again with the same command" in message
    events_after = server.events[server.events.index("half of the weights are loaded") + 1 :]
    load_policy = "teacher: load_policy, awake: kv_cache, weights"
    assert events_after == [*LOADED, load_policy, load_policy], "v1, as before, and then v2"
    journal = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [event["policy"] for event in journal if event["event"] == "weights"] == ["run v1", "run v2"]


async def test_what_waits_at_the_gate_fails_when_the_weights_were_loaded_half() -> None:
    from classroom_rl.engines.vllm.weights_gate import WeightsGate

    gate = WeightsGate()
    await gate.close(1.0)

    async def turn() -> None:
        async with gate.turn():
            pytest.fail("a turn was sampled")

    task = asyncio.create_task(turn())
    await asyncio.sleep(0)
    gate.close_for_good(EngineFailure("half loaded"))
    gate.open()  # as whoever closed it does in the end
    for awaitable in (task, turn(), gate.close(1.0)):
        with pytest.raises(EngineFailure, match="half loaded"):
            await awaitable


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return request.getfixturevalue("listening")


def test_programs_talk_to_each_other_with_the_token_and_not_without(guarded: str, monkeypatch) -> None:
    assert ClassroomClient(guarded).sample(SampleRequest(**BODY)).conversations[0].reward is not None
    for wrong_token in (None, TOKEN + "x"):
        monkeypatch.delenv(TOKEN_VARIABLE) if wrong_token is None else monkeypatch.setenv(TOKEN_VARIABLE, wrong_token)
        with pytest.raises(AccessDenied, match="what the environment variable CLASSROOM_TOKEN holds"):
            ClassroomClient(guarded).wait_until_up(60)


def test_a_request_that_no_server_takes_is_not_sent(listening: str, room: Room) -> None:
    body = SampleRequest(**BODY | {"problems": ["x" * LARGEST_BODY]})
    with pytest.raises(RequestTooLarge, match=f"but a server takes {LARGEST_BODY}: make the batch or its problems"):
        ClassroomClient(listening).sample(body)
    assert not [event for event in read_journal(room.folder / "journal.jsonl") if event["event"] == "batch"]


def test_the_client_says_which_conversation_is_unknown(listening: str) -> None:
    with pytest.raises(UnknownConversation, match="no finished conversation none"):
        ClassroomClient(listening).rewards("pedagogical", ["none"])


def test_the_server_of_another_run_is_refused_with_both_folders(
    listening: str, room: Room, generation: GenerationConfig, tmp_path: Path
) -> None:
    port = listening.rpartition(":")[2]

    def config(folder: Path) -> TrainRLConfig:
        trainer_config = training(f"logging.save_dir={folder}")
        trainer_config.generation = replace(generation, server_port=int(port))
        return trainer_config

    assert connect(config(room.folder), AssignedServer(0, listening, True)).url == listening
    with pytest.raises(ConfigError) as caught:
        connect(config(tmp_path / "other"), AssignedServer(0, listening, True))
    for part in (str(room.folder), str(tmp_path / "other"), "same logging.save_dir", "generation.server_port"):
        assert part in str(caught.value)


def test_a_server_with_other_weights_of_the_rewards_is_refused(listening: str, room: Room) -> None:
    port, weights = listening.rpartition(":")[2], "train.reward_weights={pedagogical: 0.5}"
    keys = [f"generation.server_port={port}", f"logging.save_dir={room.folder}", weights]
    with pytest.raises(ConfigError, match=r"sums up rewards by .* configured for \{'pedagogical': 0\.5\}"):
        connect(training(*keys), AssignedServer(0, listening, True))


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    """A server that is killed while it sends an answer."""
    answer = b'{"rewards": [0.5]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
    received = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for body in (answer[:5], answer):
                connection, _ = listener.accept()
                with connection:
                    received.append(connection.recv(65536))
                    connection.sendall(head + f"{len(answer)}\r\n\r\n".encode() + body)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        client = ClassroomClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert client.rewards("pedagogical", ["r-0"]) == [0.5]
        server.join(60)
    assert len(received) == 2


def test_a_client_that_waits_says_which_api_gives_the_server_no_answer_and_why(app, room: Room, caplog) -> None:
    caplog.set_level(logging.INFO, "classroom_rl.server.client")
    reported = threading.Event()

    class WaitingJudge(ScriptedJudge):
        async def judge(self, *asked) -> str:
            await asyncio.to_thread(reported.wait, 60)
            return await super().judge(*asked)

    room.judge = WaitingJudge(lambda *_: json.dumps(SCORES))
    down = "no answer for 60 s, given up after 1800 s; the last failure: no connection: ConnectError('refused')"
    role = {"url": "http://api/v1", "ledger": Mock(spent_usd=0.0, usage=lambda _: Usage()), "drain": AsyncMock()}
    caplog.handler.addFilter(lambda record: reported.set() or True if "still waiting" in record.getMessage() else True)
    port = free_port()
    application = app(port=port)
    with serving(application, port) as url:
        roles = application.state.service.environment.roles
        roles.apis |= {"judge": SimpleNamespace(model="a judge", trouble=down, **role)}
        roles.apis |= {"student": SimpleNamespace(model="a student", trouble=None, **role)}
        answer = ClassroomClient(url)._request_with_retries(
            "POST", "/sample_conversations", BODY, 60.0, "the batch", 0.5
        )
        roles.apis.clear()
    assert answer["conversations"][0]["reward"] is not None
    message = next(record.getMessage() for record in caplog.records if "still waiting" in record.getMessage())
    assert (
        f"has no answer to it yet. The judge a judge (http://api/v1): {down}." in message and "a student" not in message
    )


@pytest.mark.parametrize("answer", ["hello", '{"status": "up"}'])
def test_another_program_on_the_port_is_told_from_a_server(answer: str) -> None:
    application = FastAPI()

    @application.get("/health")
    async def health() -> object:
        from starlette.responses import Response

        return Response(answer)

    with (
        serving(application, free_port()) as url,
        pytest.raises(ClassroomError, match="is no server of this project.*generation.server_port"),
    ):
        ClassroomClient(url).wait_until_up(60)
