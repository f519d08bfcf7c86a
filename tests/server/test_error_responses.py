"""What a client is told of a request that cannot be answered."""

import pytest
import requests
from starlette.testclient import TestClient

from classroom_rl.config.values import LARGEST_BATCH
from tests.conftest import free_port
from tests.server.conftest import BODY
from tests.support.scripted_room import Room, serving


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


def test_a_policy_that_is_not_loaded_is_409(http: TestClient) -> None:
    answer = http.post("/sample_conversations", json=BODY | {"run_id": "x", "policy_version": 99})
    assert answer.status_code == 409 and "asks for policy x v99, but" in answer.json()["detail"]


def test_a_body_that_is_no_json_is_422_and_not_sent_back(http: TestClient) -> None:
    answer = http.post("/sample_conversations", content="{" + "x" * 5000, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422 and "JSON decode error" in answer.json()["detail"] and len(answer.text) < 500


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
    conversation_id = http.post("/sample_conversations", json=BODY).json()["conversations"][0]["id"]
    (room.folder / "journal.jsonl").unlink()
    for answer in (
        http.get(f"/conversations/{conversation_id}"),
        http.post("/get_length_reward", json={"conversations": [conversation_id]}),
        http.post("/sample_conversations", json=BODY | {"request_id": "next"}),
    ):
        assert answer.status_code == 507
        for part in (str(room.folder / "journal.jsonl"), "was deleted or moved away", "End the server", "put it back"):
            assert part in answer.json()["detail"]
    assert http.get("/health").status_code == 200 and not (room.folder / "journal.jsonl").exists()


def test_more_conversations_than_a_server_holds_are_422(http: TestClient, room: Room) -> None:
    size = LARGEST_BATCH + 1
    answer = http.post("/sample_conversations", json=BODY | {"problems": ["p"] * size, "answers": [""] * size})
    assert (
        answer.status_code == 422
        and f"asks for {size} conversations, but a server holds {LARGEST_BATCH}" in answer.text
    )
    assert not room.teacher.calls and len(answer.text) < 500


def test_a_problem_longer_than_the_context_is_422_and_named(http: TestClient, room: Room) -> None:
    problems = ["fractions", "Long division, " + "again and " * 900]
    answer = http.post("/sample_conversations", json=BODY | {"problems": problems, "answers": ["", ""]})
    assert answer.status_code == 422
    for part in ("'Long division, again", "tokens, but a conversation may have 900", "max_tokens_in_conversation"):
        assert part in answer.json()["detail"]
