"""A person takes a seat over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from classroom_rl.environments.marooned.messages import parse_message
from classroom_rl.server.error_responses import add_error_answers
from classroom_rl.viewer.routes import add_viewer
from tests.environments.marooned.support import MODEL, game_app

GAME = {"problem": "island 3, seat 2", "seat": 4}


@pytest.fixture
def app(tokenizer, tmp_path: Path) -> FastAPI:
    return game_app(tokenizer, tmp_path / "run")


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    yield TestClient(app, base_url="http://127.0.0.1:8005", raise_server_exceptions=False)


def test_a_game_is_played_by_posting_its_messages(http: TestClient, app: FastAPI) -> None:
    """Person and model take turns; each model message is sampled once, and nothing is kept on the server."""
    messages, acted, moment = [], 0, http.post("/api/game", json=GAME).json()
    while acted < 10:
        messages += moment["said"]
        action = "" if moment["due"] == "model" else moment["possible"][0]
        acted += bool(action)
        moment = http.post("/api/game", json=GAME | {"said": messages, "action": action}).json()
    messages += moment["said"]
    assert messages.count(MODEL) == len(app.state.engine.calls) >= 9
    assert all(parse_message(text).grade == "valid" for text in messages)
    assert "You are sailor 4" in moment["shown"] and moment["role"] in moment["rules"]
    assert http.post("/api/game", json=GAME | {"said": messages}).json()["shown"]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"problem": "a lesson"}, 422, "is no game of Marooned"),
        ({"seat": 2}, 422, "Seat 2 is the model's"),
        ({"seat": 7}, 422, "There is no seat 7"),
        ({"action": "BUILD HULL"}, 200, "It is not your turn."),
        ({"action": "x" * 3000}, 422, "2000"),
    ],
)
def test_mistakes_are_explained(http: TestClient, change: dict, status: int, message: str) -> None:
    answer = http.post("/api/game", json=GAME | change)
    assert answer.status_code == status and message in answer.text


def test_a_prompt_that_does_not_fit_is_refused(tokenizer, tmp_path: Path) -> None:
    app = game_app(tokenizer, tmp_path / "run", context=300)
    client = TestClient(app, base_url="http://127.0.0.1:8005")
    messages: list[str] = []
    with pytest.raises(AssertionError, match="its context 300: begin another game"):
        for _ in range(3):
            moment = client.post("/api/game", json=GAME | {"said": messages, "action": "WAIT" if messages else ""})
            assert moment.status_code == 200, moment.text
            messages += moment.json()["said"] or ["REASONING: -\nACTION: WAIT"]


def test_a_server_of_lessons_has_no_game(tmp_path: Path) -> None:
    app = FastAPI()
    add_error_answers(app)
    add_viewer(app, tmp_path, live=True)
    client = TestClient(app, base_url="http://127.0.0.1:8005")
    assert client.post("/api/game", json=GAME).status_code == 404
    assert client.get("/api/run").json()["game"] is False
