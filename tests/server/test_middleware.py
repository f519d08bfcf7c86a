"""The server's HTTP side with scripted engines: refused requests, error messages, paths, and the client."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
import requests
from fastapi import FastAPI
from pydantic_core import PydanticSerializationError
from starlette.testclient import TestClient

import classroom_rl.server.app
import classroom_rl.server.middleware
from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import LARGEST_BATCH
from classroom_rl.errors import (
    AccessDenied,
    ClassroomError,
    ConfigError,
    EngineFailure,
    RequestTooLarge,
    UnknownConversation,
)
from classroom_rl.models.policy_folder import write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import Usage
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.store.journal import read_journal
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.server.client import ClassroomClient
from classroom_rl.server.middleware import BodyCheck
from classroom_rl.server.schemas import LARGEST_BODY
from classroom_rl.trainer.servers import AssignedServer
from classroom_rl.trainer.session import connect
from tests.conftest import free_port
from tests.models.test_policy_folder import save_model
from tests.server.conftest import BODY, HERE, TOKEN, answers_everything
from tests.support.scripted_room import SCORES, Room, ScriptedJudge, serving

# Bad requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "named"),
    [
        ("GET", "/conversations/none", None, "none"),
        ("GET", "/wait_batch?request_id=none", None, "No request none runs here"),
        ("POST", "/get_pedagogical_reward", {"conversations": ["none"]}, "no finished conversation none"),
        ("POST", "/get_beauty_reward", {"conversations": ["none"]}, "There is no reward beauty. There are: "),
    ],
)
def test_an_unknown_id_is_404_and_named(http: TestClient, method: str, path: str, body: dict, named: str) -> None:
    answer = http.request(method, path, json=body)
    assert answer.status_code == 404 and named in answer.json()["detail"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answers": ["1/2", "1/3"]}, "{'problems': 1, 'answers': 2}"),
        ({"meta": []}, "{'problems': 1, 'answers': 1, 'meta': 0}"),
        ({"problems": [], "answers": []}, "body.problems: List should have at least 1 item"),
        ({"problems": [7]}, "body.problems.0: Input should be a valid string"),
        ({"request_id": "../r"}, "body.request_id: String should match pattern"),
        ({"surprise": 1}, "body.surprise: Extra inputs are not permitted"),
        ({"policy_version": 1}, "run_id and policy_version come together"),
    ],
)
def test_a_body_that_breaks_a_rule_is_422_with_field_and_rule(http: TestClient, room: Room, change, said: str) -> None:
    answer = http.post("/sample_conversations", json=BODY | change)
    assert answer.status_code == 422 and said in answer.json()["detail"]
    assert not room.teacher.calls


def test_a_body_that_is_no_json_is_422_and_not_sent_back(http: TestClient) -> None:
    answer = http.post("/sample_conversations", content="{" + "x" * 5000, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422 and "JSON decode error" in answer.json()["detail"] and len(answer.text) < 500


HALF = "half: \ud800"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"problems": [HALF]}, "body.problems.0"),
        ({"answers": [HALF]}, "body.answers.0"),
        ({"request_id": HALF}, "body.request_id"),
        ({"run_id": HALF, "policy_version": 1}, "body.run_id"),
        ({"meta": [{"a": [1, {"note": HALF}]}]}, "body.meta.0.a.1.note"),
        ({"meta": [{HALF: 1}]}, "body.meta.0.half: \ufffd"),
        ({HALF: 1}, "body.half: \ufffd"),
    ],
)
@pytest.mark.parametrize("ascii", [True, False])
def test_half_a_character_anywhere_in_a_body_is_422_with_its_field(http, room: Room, change, where, ascii) -> None:
    content = json.dumps(BODY | change, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    answer = http.post("/sample_conversations", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"].startswith(f"{where}: Text may hold no half of a character (a lone surrogate")
    assert not room.teacher.calls


@pytest.mark.parametrize(
    "path",
    ["/load_weights", "/sleep", "/get_pedagogical_reward", "/check_judge", "/api/chat", "/api/corrections/decision"],
)
def test_half_a_character_is_422_on_every_other_route_too(http: TestClient, path: str) -> None:
    answer = http.post(path, content=json.dumps({"problem": [HALF]}), headers={"Content-Type": "application/json"})
    assert answer.status_code == 422 and answer.json()["detail"].startswith("body.problem.0: Text may hold no half")


def test_half_a_character_in_a_mounted_route_is_400_as_openai_says_it(app: Callable[..., FastAPI]) -> None:
    application = app()
    application.mount("/v1", answers_everything)
    body = {"messages": [{"role": "user", "content": HALF}]}
    with TestClient(application, base_url=HERE) as client:
        answer = client.post("/v1/chat/completions", content=json.dumps(body))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "body.messages.0.content"
        body["messages"][0]["content"] = "whole: \U0001f642, \\ud800"
        assert client.post("/v1/chat/completions", content=json.dumps(body)).status_code == 200


def test_whole_characters_are_taken_however_they_are_escaped(http: TestClient) -> None:
    content = json.dumps(BODY | {"problems": ["a smile: \U0001f642, and \\ud800"]})
    answer = http.post("/sample_conversations", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    assert answer.json()["conversations"][0]["problem"] == "a smile: \U0001f642, and \\ud800"


def test_meta_that_nests_deep_is_422_and_its_id_may_be_used_again(http: TestClient, room: Room) -> None:
    for levels in (25, 500, 900):
        content = json.dumps(BODY | {"meta": ["deep"]}).replace('"deep"', '{"a":' * levels + "1" + "}" * levels)
        answer = http.post("/sample_conversations", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422
        assert "body.meta: Value error, entry 0 holds values within values on more than 20" in answer.json()["detail"]
    assert not room.teacher.calls
    assert http.post("/sample_conversations", json=BODY | {"meta": [{"a": {"b": [1]}}]}).status_code == 200


def test_a_request_that_cannot_be_named_is_refused_before_it_runs(room: Room, generation) -> None:
    """The cause is told, and no work goes on that nobody waits for."""
    request = SampleRequest.model_construct(**BODY | {"meta": [{"a": HALF}], "judge_again": False})

    async def ask() -> None:
        with pytest.raises(PydanticSerializationError, match="surrogates not allowed"):
            await room.open(generation).sample(request)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(ask())


def test_the_cause_of_a_failed_batch_is_told_though_its_id_is_gone(room: Room, generation) -> None:
    service = room.open(generation)

    async def fail(*_: object) -> None:
        service._batches.clear()
        raise EngineFailure("the cause")

    service.runner.sample = fail
    with pytest.raises(EngineFailure, match="the cause"):
        asyncio.run(service.sample(SampleRequest(**BODY)))


def test_an_unexpected_error_is_answered_as_json_and_its_traceback_logged(app, caplog) -> None:
    async def break_down() -> None:
        raise LookupError("nobody thought of this \ud800")

    port = free_port()
    application = app(port=port)
    application.router.add_api_route("/break", break_down)
    with serving(application, port) as url:
        answer = requests.get(f"{url}/break", timeout=60)
    assert answer.status_code == 500
    assert (
        "LookupError: nobody thought of this \ufffd. It goes on; the traceback is in its log" in answer.json()["detail"]
    )
    assert "Traceback" in caplog.text


def test_a_journal_that_was_deleted_is_told_with_what_to_do(http: TestClient, room: Room) -> None:
    played = http.post("/sample_conversations", json=BODY).json()["conversations"][0]["id"]
    (room.folder / "journal.jsonl").unlink()
    for answer in (
        http.get(f"/conversations/{played}"),
        http.post("/get_length_reward", json={"conversations": [played]}),
        http.post("/sample_conversations", json=BODY | {"request_id": "next"}),
    ):
        assert answer.status_code == 507
        for part in (str(room.folder / "journal.jsonl"), "was deleted or moved away", "End the server", "put it back"):
            assert part in answer.json()["detail"]
    assert http.get("/health").status_code == 200 and not (room.folder / "journal.jsonl").exists()


def test_more_conversations_than_a_server_holds_are_422(http: TestClient, room: Room) -> None:
    many = LARGEST_BATCH + 1
    answer = http.post("/sample_conversations", json=BODY | {"problems": ["p"] * many, "answers": [""] * many})
    assert (
        answer.status_code == 422
        and f"asks for {many} conversations, but a server holds {LARGEST_BATCH}" in answer.text
    )
    assert not room.teacher.calls and len(answer.text) < 500


def test_a_problem_longer_than_the_context_is_422_and_named(http: TestClient, room: Room) -> None:
    problems = ["fractions", "Long division, " + "again and " * 900]
    answer = http.post("/sample_conversations", json=BODY | {"problems": problems, "answers": ["", ""]})
    assert answer.status_code == 422
    for part in ("'Long division, again", "tokens, but a conversation may have 900", "max_tokens_in_conversation"):
        assert part in answer.json()["detail"]


@pytest.mark.parametrize("announced", [True, False])
def test_an_oversized_body_is_413_and_not_read_into_memory(http: TestClient, monkeypatch, announced: bool) -> None:
    monkeypatch.setattr(classroom_rl.server.middleware, "LARGEST_BODY", 1000)
    content = b" " * 1001 if announced else (b" " * 100 for _ in range(11))
    headers = {"Content-Type": "application/json"}
    answer = http.post("/sample_conversations", content=content, headers=headers)
    assert answer.status_code == 413 and f"larger than the {LARGEST_BODY} bytes" in answer.json()["detail"]
    assert http.post("/sample_conversations", json=BODY).status_code == 200


@pytest.mark.parametrize(("announced", "most_read"), [(b"2000", 0), (None, 1100)])
def test_reading_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch, announced: bytes | None, most_read: int) -> None:
    monkeypatch.setattr(classroom_rl.server.middleware, "LARGEST_BODY", 1000)
    read, sent = 0, []

    async def receive() -> dict:
        nonlocal read
        read += 100
        return {"type": "http.request", "body": b" " * 100, "more_body": True}

    async def send(message: dict) -> None:
        sent.append(message)

    async def reads_all(scope: dict, receive: Callable, send: Callable) -> None:
        while (await receive()).get("more_body"):
            pass

    headers = [(b"content-length", announced)] if announced else []
    asyncio.run(BodyCheck(reads_all)({"type": "http", "headers": headers}, receive, send))
    assert sent[0]["status"] == 413 and read == most_read


def test_a_taken_port_is_refused_before_models_are_loaded_with_who_holds_it(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = load(TrainRLConfig, "train_rl", [f"generation.server_port={port}", f"logging.save_dir={tmp_path}"])
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*Process {os.getpid()} listens there"):
            classroom_rl.server.app.serve(config)


def test_a_server_that_cannot_start_ends_with_the_message_alone(tmp_path: Path) -> None:
    overrides = ["generation.teacher_prompt_path=nowhere.txt", f"logging.save_dir={tmp_path}"]
    command = [sys.executable, "vllm_server.py", f"generation.server_port={free_port()}", *overrides]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 2
    assert "error: generation.teacher_prompt_path: There is no prompt template nowhere.txt in " in result.stderr
    assert "Traceback" not in result.stderr + result.stdout


# Paths ----------------------------------------------------------------------------------------------------------


def outside(room: Room, published: Path) -> str:
    elsewhere = room.folder.parent / "elsewhere"
    write_policy(elsewhere, PolicyVersion("run", 1), save_model)
    return str(elsewhere)


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
    loaded = room.teacher.policy
    body = {"run_id": "run", "version": 1, "path": path(room, published)}
    answer = http.post("/load_weights", json=body)
    assert answer.status_code == 422 and said in answer.json()["detail"]
    assert room.teacher.policy == loaded


# The client's end ----------------------------------------------------------------------------------------------


def test_the_client_sends_the_token(listening: str) -> None:
    assert ClassroomClient(listening).health().status == "ok"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return request.getfixturevalue("listening")


def test_programs_talk_to_each_other_with_the_token_and_not_without(guarded: str, monkeypatch) -> None:
    assert ClassroomClient(guarded).sample(SampleRequest(**BODY)).conversations[0].reward is not None
    for wrong in (None, TOKEN + "x"):
        monkeypatch.delenv(TOKEN_VARIABLE) if wrong is None else monkeypatch.setenv(TOKEN_VARIABLE, wrong)
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
        found = load(TrainRLConfig, "train_rl", [f"logging.save_dir={folder}"])
        found.generation = replace(generation, server_port=int(port))
        return found

    assert connect(config(room.folder), AssignedServer(0, listening, True)).url == listening
    with pytest.raises(ConfigError) as caught:
        connect(config(tmp_path / "other"), AssignedServer(0, listening, True))
    for part in (str(room.folder), str(tmp_path / "other"), "same logging.save_dir", "generation.server_port"):
        assert part in str(caught.value)


def test_a_server_with_other_weights_of_the_rewards_is_refused(listening: str, room: Room) -> None:
    port, weights = listening.rpartition(":")[2], "train.reward_weights={pedagogical: 0.5}"
    keys = [f"generation.server_port={port}", f"logging.save_dir={room.folder}", weights]
    with pytest.raises(ConfigError, match=r"sums up rewards by .* configured for \{'pedagogical': 0\.5\}"):
        connect(load(TrainRLConfig, "train_rl", keys), AssignedServer(0, listening, True))


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    """A server that is killed while it sends an answer."""
    answer = b'{"rewards": [0.5]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for sent in (answer[:5], answer):
                connection, _ = listener.accept()
                with connection:
                    asked.append(connection.recv(65536))
                    connection.sendall(head + f"{len(answer)}\r\n\r\n".encode() + sent)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        client = ClassroomClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert client.rewards("pedagogical", ["r-0"]) == [0.5]
        server.join(60)
    assert len(asked) == 2


def test_a_client_that_waits_says_which_api_gives_the_server_no_answer_and_why(app, room: Room, caplog) -> None:
    caplog.set_level(logging.INFO, "classroom_rl.server.client")
    told = threading.Event()

    class WaitingJudge(ScriptedJudge):
        async def judge(self, *asked) -> str:
            await asyncio.to_thread(told.wait, 60)
            return await super().judge(*asked)

    room.judge = WaitingJudge(lambda *_: json.dumps(SCORES))
    down = "no answer for 60 s, given up after 1800 s; the last failure: no connection: ConnectError('refused')"
    role = {"url": "http://api/v1", "ledger": Mock(spent_usd=0.0, usage=lambda _: Usage()), "drain": AsyncMock()}
    caplog.handler.addFilter(lambda record: told.set() or True if "still waiting" in record.getMessage() else True)
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
    said = next(record.getMessage() for record in caplog.records if "still waiting" in record.getMessage())
    assert f"has no answer to it yet. The judge a judge (http://api/v1): {down}." in said and "a student" not in said


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
