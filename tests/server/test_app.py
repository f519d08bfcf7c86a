"""A server that outlives its trainers and their connections: its start, its weights, its end, and its garbage."""

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy
import pytest
import requests
from fastapi import FastAPI
from safetensors.numpy import save_file
from starlette.testclient import TestClient

import classroom_rl.server.app
import classroom_rl.server.middleware
from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import ROOT
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError, EngineFailure, PolicyMismatch
from classroom_rl.models.policy_folder import policy_path, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.server import app as garbage
from classroom_rl.server.sampling_service import SamplingService
from tests.conftest import free_port
from tests.models.test_policy_folder import save_model
from tests.support.configs import training
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import SCORES, Room, serving
from tests.support.waiting import wait_until

POLICY = PolicyVersion("run", 2)
BODY = {
    "problems": ["fractions", "fractions"],
    "answers": ["1/2", "1/2"],
    "request_id": "run-step000002",
    "seed": 1,
    "step": 2,
    "run_id": "run",
    "policy_version": 2,
}
REQUEST = SampleRequest(**BODY)


def publish(room: Room, content: float) -> Path:
    """The run's version 2, as a trainer with these weights publishes it."""
    folder = policy_path(room.folder, POLICY.version)
    weights = {"w": numpy.full(4, content, numpy.float32)}
    write_policy(folder, POLICY, lambda target: save_file(weights, target / "model.safetensors"))
    return folder


class Halting:
    """Stops whoever comes first, until told to let go; `reached` says that somebody came."""

    def __init__(self) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            await self.go.wait()


class HaltingStudent(ScriptedEngine):
    def __init__(self, tokenizer, halt: Halting):
        super().__init__(tokenizer, lambda _: "Hello.")
        self._halt = halt

    async def chat(self, *arguments, **named):
        await self._halt()
        return await super().chat(*arguments, **named)


class HaltingJudge(ScriptedJudge):
    def __init__(self, halt: Callable):
        super().__init__(lambda *_: json.dumps(SCORES))
        self._halt = halt

    async def judge(self, *arguments, **named) -> str:
        await self._halt()
        return await super().judge(*arguments, **named)


async def resume(room: Room, service: SamplingService) -> None:
    """What a trainer does that went back to an earlier checkpoint and made the same step again, a little otherwise."""
    await service.load_policy(publish(room, 2.0), POLICY, 5.0)
    room.teacher._script = lambda _: "Say goodbye."


@pytest.mark.parametrize("when", ["finished", "talking", "judging"])
async def test_a_resumed_trainer_gets_conversations_of_the_weights_that_it_published(room, generation, when) -> None:
    halt = Halting()
    if when == "talking":
        room.student = HaltingStudent(room.tokenizer, halt)
    if when == "judging":
        room.judge = HaltingJudge(halt)
    service = room.open(generation)
    await service.load_policy(publish(room, 1.0), POLICY, 5.0)
    task = asyncio.create_task(service.sample(REQUEST))
    await (task if when == "finished" else halt.reached.wait())
    await resume(room, service)
    response = await asyncio.wait_for(service.sample(REQUEST), 60)
    halt.go.set()
    if when != "finished":
        with pytest.raises(PolicyMismatch, match="ther weights were loaded"):
            await task
    calls = len(room.teacher.calls)
    assert await service.sample(REQUEST) == response and len(room.teacher.calls) == calls
    texts = {turn.text for record in response.conversations for turn in record.turns if turn.role == "teacher"}
    assert texts == {"Say goodbye."}
    assert [service.record(record.id) for record in response.conversations] == response.conversations
    events = list(read_journal(room.folder / JOURNAL_NAME))
    last_batch = max(index for index, event in enumerate(events) if event["event"] == "batch")
    since = [event["event"] for event in events[last_batch:]]
    assert (since.count("turn"), since.count("verdict"), since.count("conversation")) == (10, 2, 2)


async def test_conversations_do_not_go_on_with_other_weights_of_the_same_name(room: Room, generation) -> None:
    halt = Halting()
    room.student = HaltingStudent(room.tokenizer, halt)
    service = room.open(generation)
    await service.load_policy(publish(room, 1.0), POLICY, 5.0)
    batch = asyncio.create_task(service.sample(REQUEST))
    await halt.reached.wait()
    await resume(room, service)
    halt.go.set()
    with pytest.raises(PolicyMismatch, match=r"Other weights were loaded as policy run v2 .* Ask for it again"):
        await batch
    assert service.running == []


async def test_the_same_weights_published_again_change_nothing(room: Room, generation: GenerationConfig) -> None:
    service = room.open(generation)
    await service.load_policy(publish(room, 1.0), POLICY, 5.0)
    response = await service.sample(REQUEST)
    await service.load_policy(publish(room, 1.0), POLICY, 5.0)
    call_count = len(room.teacher.calls)
    assert await service.sample(REQUEST) == response and len(room.teacher.calls) == call_count


def test_weights_conversations_and_checks_of_the_judge_over_http(room: Room, app: Callable[..., FastAPI]) -> None:
    judged = []
    room.judge = ScriptedJudge(lambda rule, conversation, _: judged.append(conversation) or json.dumps(SCORES))
    with TestClient(app(), base_url="http://127.0.0.1:8005") as http:

        def step(content: float) -> tuple[str, int]:
            weights = {"run_id": "run", "version": 2, "path": str(publish(room, content))}
            assert http.post("/load_weights", json=weights).status_code == 200
            record = http.post("/sample_conversations", json=BODY).json()["conversations"][0]
            judged.clear()
            check = {"request_id": "check", "step": 2, "conversations": [record["id"]]}
            assert http.post("/check_judge", json=check).json()["canaries"]
            return record["turns"][0]["text"], len(judged)

        first, canaries = step(1.0)
        assert canaries > 0 and step(1.0) == (first, 0)
        room.teacher._script = lambda _: "Say goodbye."
        assert step(2.0) == ("Say goodbye.", canaries)


class HeldJudge(ScriptedJudge):
    """Judges nothing before the test lets it."""

    def __init__(self, answer: Callable):
        super().__init__(answer)
        self.free = threading.Event()

    async def judge(self, *arguments, **named) -> str:
        while not self.free.is_set():
            await asyncio.sleep(0.01)
        return await super().judge(*arguments, **named)


@contextmanager
def listening(app: Callable[..., FastAPI], judge: HeldJudge) -> Iterator[tuple[str, FastAPI]]:
    port = free_port()
    application = app(port=port)
    with serving(application, port) as url:
        try:
            yield f"{url}/sample_conversations", application
        finally:
            judge.free.set()  # or the server would not end


def test_nobody_waits_for_a_client_that_has_hung_up_and_an_answer_is_serialised_once(room, app, monkeypatch) -> None:
    body = BODY | {"run_id": None, "policy_version": None}
    serialised, as_json = [], SampleResponse.as_json
    monkeypatch.setattr(SampleResponse, "as_json", lambda self: serialised.append(self) or as_json(self))
    room.judge = HeldJudge(lambda *_: json.dumps(SCORES))
    with listening(app, room.judge) as (url, application):

        def waiting() -> int:
            batches = application.state.service._batches
            return batches[body["request_id"]].waiting if batches else 0

        for _ in range(3):
            with pytest.raises(requests.Timeout):
                requests.post(url, json=body, timeout=0.5)
        wait_until(lambda: waiting() == 0)
        answers: list[bytes] = []
        clients = [threading.Thread(target=lambda: answers.append(requests.post(url, json=body).content)) for _ in "ab"]
        for client in clients:
            client.start()
        wait_until(lambda: waiting() == 2)
        room.judge.free.set()
        for client in clients:
            client.join(120)
        assert len(serialised) == 1 and answers == [serialised[0].model_dump_json().encode()] * 2
        assert all(
            record.reward is not None
            for record in SampleResponse[ConversationRecord].model_validate_json(answers[0]).conversations
        )
        assert application.state.service._batches[body["request_id"]].body is None


def test_a_server_ends_with_its_engine_although_nobody_waits_for_the_batch(room: Room, app) -> None:
    def fail(*_: object) -> str:
        raise EngineFailure("the judge's engine hangs")

    ended = threading.Event()
    room.judge = HeldJudge(fail)
    with listening(app, room.judge) as (url, application):
        application.state.end = ended.set
        request = requests.Request("POST", url, json=BODY | {"run_id": None, "policy_version": None}).prepare()
        address = urlsplit(url)
        lines = [f"POST {address.path} HTTP/1.1", f"Host: {address.netloc}"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall("\r\n".join([*lines, "", ""]).encode() + request.body)
            wait_until(lambda: application.state.service._batches)
        room.judge.free.set()
        assert ended.wait(120) and "the judge's engine hangs" in str(application.state.failure)


def test_functions_under_the_name_src_vllm_client_talk_to_the_server_on_a_port(app: Callable[..., FastAPI]) -> None:
    import src.vllm.client as client  # the name that users of PedagogicalRL know

    port = free_port()
    with serving(app(port=port), port):
        request = REQUEST.model_copy(update={"run_id": None, "policy_version": None})
        conversations = client.sample_conversations(request, port).conversations
        ids = [record.id for record in conversations]
        assert client.get_pedagogical_reward(ids, port) == [record.rewards["pedagogical"] for record in conversations]
        assert client.get_reward("length", ids, port) == [0.0, 0.0]


@pytest.fixture
def collections(monkeypatch):
    """The generations that are collected, in order."""
    monkeypatch.setattr(garbage, "_SECONDS_BETWEEN_CHECKS", 0)
    collected: list[int] = []
    monkeypatch.setattr(garbage.gc, "collect", collected.append)
    yield collected
    gc.unfreeze()


async def _look(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def test_it_collects_once_after_each_time_of_playing_and_never_in_it(collections, monkeypatch):
    monkeypatch.setattr(garbage, "_IDLE_PERIODS_PER_FULL_COLLECTION", 3)

    async def play() -> list[list[int]]:
        service = SimpleNamespace(running=[], runner=SimpleNamespace(finished=0))
        task = asyncio.create_task(garbage.collect_at_rest(service))
        snapshots = []
        for running, finished in (([], 0), (["a"], 3), (["a"], 3), ([], 9), ([], 9), (["b"], 12), ([], 14), ([], 20)):
            service.running, service.runner.finished = running, finished
            await _look(5)
            snapshots.append(list(collections))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return snapshots

    full, short = 2, 1
    begun, once, twice = [full], [full, short], [full, short, short]
    assert asyncio.run(play()) == [begun, begun, begun, once, once, once, twice, [*twice, full]]


def test_python_starts_none_meanwhile_and_may_again_afterwards(collections):
    async def during() -> tuple[int, ...]:
        task = asyncio.create_task(
            garbage.collect_at_rest(SimpleNamespace(running=["a"], runner=SimpleNamespace(finished=0)))
        )
        await _look(3)
        thresholds = gc.get_threshold()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return thresholds

    before = gc.get_threshold()
    now = asyncio.run(during())
    assert now[:2] == before[:2] and now[2] > 10**9
    assert gc.get_threshold() == before


def test_a_taken_port_is_refused_before_models_are_loaded_with_who_holds_it(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = training(f"generation.server_port={port}", f"logging.save_dir={tmp_path}")
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*Process {os.getpid()} listens there"):
            classroom_rl.server.app.serve(config)


def test_a_server_that_cannot_start_ends_with_the_message_alone(tmp_path: Path) -> None:
    overrides = ["generation.teacher_prompt_path=nowhere.txt", f"logging.save_dir={tmp_path}"]
    command = [sys.executable, "vllm_server.py", f"generation.server_port={free_port()}", *overrides]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 2
    assert "error: generation.teacher_prompt_path: There is no prompt template nowhere.txt in " in result.stderr
    assert "Traceback" not in result.stderr + result.stdout


def outside(room: Room, published: Path) -> str:
    folder = room.folder.parent / "elsewhere"
    write_policy(folder, PolicyVersion("run", 1), save_model)
    return str(folder)


def linked_folder(room: Room, published: Path) -> str:
    (room.folder / "policy" / "v000009").symlink_to(outside(room, published))
    return str(room.folder / "policy" / "v000009")


def linked_file(room: Room, published: Path) -> str:
    (published / "model.safetensors").unlink()
    (published / "model.safetensors").symlink_to(Path(outside(room, published)) / "model.safetensors")
    return str(published)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (outside, "is not inside this server's run folder"),
        (linked_folder, "is not inside this server's run folder"),
        (linked_file, "is not inside this server's run folder"),
        (lambda room, published: f"{published}/../../../elsewhere", "is not inside this server's run folder"),
        (lambda *_: "/etc", "is not inside this server's run folder"),
        (lambda *_: "policy\0/v000001", "is no path"),
        (lambda *_: "x" * 5000, "is no"),
        (lambda room, published: str(published.parent), "no file COMPLETE in it"),
        (lambda room, published: str(published / "nowhere"), "no file COMPLETE in it"),
    ],
)
def test_weights_come_from_inside_the_run_folder_only(
    http: TestClient, room: Room, published: Path, path, said
) -> None:
    policy_before = room.teacher.policy
    body = {"run_id": "run", "version": 1, "path": path(room, published)}
    answer = http.post("/load_weights", json=body)
    assert answer.status_code == 422 and said in answer.json()["detail"]
    assert room.teacher.policy == policy_before


def test_weights_that_nobody_would_send_are_refused(http: TestClient) -> None:
    """The server was started for weights from files."""
    group = {"id": "g", "rank_offset": 1, "world_size": 2, "packed_buffer_size_bytes": 10}
    group |= {"master_address": "127.0.0.1", "master_port": 1}
    tensors = [{"name": "w", "dtype": "float32", "shape": [1]}]
    answer = http.post("/weights/receive", json={"run_id": "run", "version": 1, "group": group, "tensors": tensors})
    assert answer.status_code == 422 and "was started with train.publish_through=disk" in answer.json()["detail"]
    assert http.delete("/weights/receive").status_code == 204, "there is nothing to give up"
