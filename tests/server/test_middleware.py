"""What is refused before a route sees it: bodies with half a character, that nest deep, or that are too large."""

import asyncio
import json
from collections.abc import Callable

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import classroom_rl.server.app
import classroom_rl.server.middleware
from classroom_rl.server.middleware import BodyCheck
from classroom_rl.server.schemas import LARGEST_BODY
from tests.server.conftest import BODY, HERE, answers_everything
from tests.support.scripted_room import Room

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
