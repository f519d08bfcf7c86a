"""Tests of reviews on the page's routes, and of the teacher's desk: what it lists, which decisions it writes, and who
may make them."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from classroom_rl.results.corrections import DECISIONS_NAME, LONGEST_TEXT, read_decisions
from classroom_rl.results.rollout_files import write_rollouts
from tests.support.supervised_run import (
    CORRECTIONS,
    FALSE_CORRECTION,
    LEAK,
    NO_VERDICT,
    REFUSED,
    decisions_in,
    make_supervised_run,
    supervised,
)
from tests.support.viewer_run import client_on, listed, write_journal

TOKEN = "0123456789abcdef-0123456789"
REQUEST = "run-step000002-rank0of1-abcd"
DECIDE = "/api/corrections/decision"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_supervised_run(tmp_path / "run")


@pytest.fixture
def http(run: Path) -> TestClient:
    return client_on(run)


def told(http: TestClient, index: int) -> dict:
    answer = http.get("/api/conversation", params={"where": "step-2", "id": f"{REQUEST}-{index:04d}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def desk(http: TestClient, **query: object) -> dict:
    answer = http.get("/api/corrections", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def body(index: int = 0, decision: str = "accept", **more: object) -> dict:
    turn, draft, _ = CORRECTIONS.get(index, (2, -1, ""))
    return {"conversation": f"{REQUEST}-{index:04d}", "turn": turn, "draft": draft, "decision": decision} | more


def decide(http: TestClient, *arguments: object, **more: object) -> dict:
    answer = http.post(DECIDE, json=body(*arguments, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


# Reviews ---------------------------------------------------------------------------------------------------------


def test_a_message_is_told_with_its_review_its_drafts_and_what_became_of_them(http: TestClient) -> None:
    observed, retried, replaced, refused, _, thrice = (told(http, i)["turns"] for i in range(6))
    assert observed[0]["review"]["valid"] and observed[1]["review"] is None
    assert observed[2]["review"]["correction"] == LEAK.correction and observed[2]["review"]["penalty"] == -2
    assert observed[4]["review"]["valid"] is None and observed[4]["review"]["error"] == NO_VERDICT.error
    assert retried[2]["review"]["valid"] and not retried[2]["replaced"]
    (draft,) = retried[2]["drafts"]
    assert draft["parts"] == [["thought", "<think>Tell it.</think>"], ["said", "It is *he goes*."]]
    assert draft["review"]["category"] == "ignores_error"
    assert replaced[2]["replaced"] and replaced[2]["parts"] == [["said", FALSE_CORRECTION.correction]]
    assert refused[2]["review"]["correction"] is None
    assert refused[2]["review"]["refused_correction"] == REFUSED.refused_correction
    assert refused[2]["review"]["refused_text"] == "Say: the baker sells bread."
    assert [draft["review"]["category"] for draft in thrice[2]["drafts"]] == ["off_topic", "leak"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"review": "invalid"}, [0, 1, 2, 3, 5]),
        ({"review": "none"}, [0]),
        ({"category": "leak"}, [0, 5]),
        ({"category": "off_topic"}, [3, 5]),
        ({"category": "length"}, []),
        ({"category": "leak", "review": "none"}, [0]),
    ],
)
def test_conversations_are_filtered_by_review_and_category(http: TestClient, query: dict, found: list) -> None:
    page = listed(http, where="step-2", **query)
    assert page["columns"]["index"] == found
    assert page["categories"] == ["false_correction", "ignores_error", "leak", "off_topic"] and page["reviewed"]


def test_a_rejected_draft_counts_once_also_if_its_correction_was_heard(http: TestClient) -> None:
    assert listed(http, where="step-2")["columns"]["categories"][2] == {"false_correction": 1}
    assert http.get("/api/conversations", params={"where": "step-2", "review": "all"}).status_code == 422


def test_the_supervisor_s_metrics_are_shown_and_rare_passes_survive_the_thinning(run: Path, http: TestClient) -> None:
    assert http.get("/api/run").json()["supervised"]
    series = http.get("/api/metrics").json()["series"]
    assert {"supervision/valid_share", "supervision/category/leak", "corrections/pass_kl"} <= set(series)
    passes = {step: {"corrections/pass_kl": 0.01} for step in range(25, 5001, 25)}
    lines = [json.dumps({"step": step, "reward": 0.5} | passes.get(step, {})) + "\n" for step in range(1, 5001)]
    (run / "metrics.jsonl").write_text("".join(lines))
    metrics = http.get("/api/metrics").json()
    kl = dict(zip(metrics["steps"], metrics["series"]["corrections/pass_kl"], strict=True))
    assert {step for step, value in kl.items() if value is not None} == set(passes)


# The desk --------------------------------------------------------------------------------------------------------


def test_the_desk_lists_corrections_with_what_led_to_them(http: TestClient) -> None:
    page = desk(http, limit=4)
    assert page["total"] == page["undecided"] == page["matching"] == 12
    assert page["categories"] == {"false_correction": 3, "ignores_error": 3, "leak": 6}
    assert page["precision"] == [] and page["overall"]["precision"] is None
    corrections = page["corrections"]
    assert {row["index"]: (row["turn"], row["draft"], row["review"]["category"]) for row in corrections} == CORRECTIONS
    assert {row["step"] for row in corrections} == {2} and [len(row["before"]) for row in corrections] == [2] * 4
    observed, retried, replaced, thrice = corrections
    assert observed["heard"] is None and observed["message"][-1] == ["said", "Go on 1."]
    assert retried["message"][-1] == ["said", "It is *he goes*."] and retried["heard"][-1] == ["said", "Go on 1."]
    assert replaced["replaced"] and replaced["heard"] == [["said", FALSE_CORRECTION.correction]]
    assert thrice["message"] == [["said", "The answer is baker. Say: baker."]]
    later = desk(http, limit=50, offset=4)["corrections"]
    assert [row["step"] for row in later] == [1] * 4 + [0] * 4


def test_a_run_without_reviews_has_an_empty_desk(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_rollouts(run, 0, 0, [supervised(0)[4]])
    http = client_on(run)
    assert desk(http)["total"] == 0 and not http.get("/api/run").json()["supervised"]


def test_a_finished_conversation_that_is_in_no_file_yet_is_on_the_desk(run: Path, http: TestClient) -> None:
    record = supervised(3)[0]
    plain = record.model_dump(mode="json", exclude={"prompt_ids", "completion_ids", "mask", "logprobs", "branches"})
    write_journal(run, [{"event": "conversation", "time": 4e9, "conversation": record.id, "record": plain}])
    first = desk(http)["corrections"][0]
    assert (first["conversation"], first["where"]) == (record.id, "now")
    assert http.post(DECIDE, json=body() | {"conversation": record.id}).status_code == 200
    write_rollouts(run, 3, 0, [record])
    page = desk(http)
    assert page["total"] == 13 and page["corrections"][0]["decision"]["decision"] == "accept"
    assert page["corrections"][0]["where"] == "step-3"


def test_decisions_are_written_filtered_by_and_the_last_one_wins(run: Path, http: TestClient) -> None:
    decide(http, 0, "accept")
    decide(http, 1, "edit", text="Look again: «he …»?")
    decide(http, 2, "reject", message_was_fine=True)
    answer = decide(http, 0, "reject")
    assert answer["decision"]["category"] == "leak" and answer["undecided"] == 9
    assert {row["category"]: row["precision"] for row in answer["precision"]} == {
        "false_correction": 0.0,
        "ignores_error": 1.0,
        "leak": 0.0,
    }
    assert answer["overall"]["decided"] == 3 and answer["overall"]["fine"] == 1
    lines = decisions_in(run)
    assert [line["decision"] for line in lines] == ["accept", "edit", "reject", "reject"]
    assert [(line["turn"], line["draft"]) for line in lines] == [(2, -1), (2, 0), (2, 0), (2, -1)]
    assert lines[1]["text"] == "Look again: «he …»?" and lines[0]["time"] > 1e9
    decisions = read_decisions(run)
    assert decisions[f"{REQUEST}-0000", 2, -1].decision == "reject" and len(decisions) == 3
    counts = {name: desk(http, decision=name)["matching"] for name in ("open", "accept", "edit", "reject", "fine")}
    assert counts == {"open": 9, "accept": 0, "edit": 1, "reject": 2, "fine": 1}
    only = desk(http, decision="reject", category="leak")["corrections"]
    assert [row["decision"]["decision"] for row in only] == ["reject"]
    assert desk(client_on(run), category="leak")["matching"] == 6


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"conversation": "nobody"}, 404, "no conversation 'nobody'"),
        ({"turn": 0}, 422, "no correction of message 0 (both are counted from 0). It has: message 2."),
        ({"turn": 99}, 422, "It has: message 2."),
        ({"draft": 0}, 422, "no correction of draft 0 of message 2"),
        ({"conversation": f"{REQUEST}-0003"}, 422, "It has: none."),
        ({"conversation": f"{REQUEST}-0002"}, 422, "It has: message 2, draft 0."),
        ({"decision": "edit"}, 422, "an edit needs a text"),
        ({"decision": "edit", "text": " \n"}, 422, "an edit needs a text"),
        ({"decision": "edit", "text": "x" * (LONGEST_TEXT + 1)}, 422, "body.text: String should have at most 20000"),
        ({"decision": "edit", "text": "half \ud800"}, 422, "body.text: Text may hold no half of a character"),
        ({"text": "an accepted one with a text"}, 422, "only an edit has a text"),
        ({"message_was_fine": True}, 422, "message_was_fine"),
        ({"decision": "perhaps"}, 422, "body.decision"),
        ({"turn": -1}, 422, "body.turn"),
        ({"draft": -2}, 422, "body.draft"),
        ({"conversation": "x" * 301}, 422, "body.conversation"),
        ({"time": 1.0}, 422, "body.time"),
    ],
)
def test_what_cannot_be_decided_on_is_refused_and_not_written(run, http, changes: dict, status: int, said: str) -> None:
    answer = http.post(DECIDE, content=json.dumps(body() | changes), headers={"Content-Type": "application/json"})
    assert answer.status_code == status and said in answer.json()["detail"]
    assert not (run / DECISIONS_NAME).exists()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "conversation": st.sampled_from([f"{REQUEST}-{i:04d}" for i in range(7)]) | SCALARS,
        "turn": st.integers(-2, 6) | SCALARS,
        "draft": st.integers(-2, 3) | SCALARS,
        "decision": st.sampled_from(["accept", "edit", "reject"]) | SCALARS,
        "text": st.text(max_size=30) | SCALARS,
        "message_was_fine": SCALARS,
    },
)


@settings(max_examples=200, deadline=None)
@given(
    BODIES
    | st.builds(
        lambda index, decision, text: body(index, decision, text=text),
        st.sampled_from(list(CORRECTIONS)),
        st.sampled_from(["accept", "edit", "reject"]),
        st.text(st.characters(), max_size=30),
    )
)
def test_any_body_is_answered_and_only_a_valid_one_written(shared: tuple[Path, TestClient], given_body: dict) -> None:
    run, http = shared
    before = decisions_in(run)
    answer = http.post(DECIDE, content=json.dumps(given_body), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 404, 422), answer.text
    after = decisions_in(run)
    assert after[: len(before)] == before and len(after) == len(before) + (answer.status_code == 200)
    if answer.status_code == 200:
        expected = {"text": "", "message_was_fine": False} | given_body
        assert all(after[-1][name] == value for name, value in expected.items())
        index = int(expected["conversation"][-1])
        assert (after[-1]["turn"], after[-1]["draft"], after[-1]["category"]) == CORRECTIONS[index]
    assert desk(http)["total"] == 12 and len(read_decisions(run)) <= 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TestClient]:
    run = make_supervised_run(tmp_path_factory.mktemp("shared") / "run")
    return run, client_on(run)


# Who may decide --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Host": "evil.example"},
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
    ],
)
def test_another_site_s_page_cannot_decide(run: Path, http: TestClient, headers: dict) -> None:
    content = json.dumps(body())
    answer = http.post(DECIDE, content=content, headers={"Content-Type": "application/json"} | headers)
    assert answer.status_code == 403 and not (run / DECISIONS_NAME).exists()
    same_origin = {"Content-Type": "application/json", "Origin": "http://127.0.0.1:8005"}
    assert http.post(DECIDE, content=content, headers=same_origin).status_code == 200


def test_without_the_token_nobody_decides(run: Path) -> None:
    http = client_on(run, TOKEN, "http://elsewhere:8005")
    for headers in ({}, {"Authorization": "Bearer wrong-wrong-wrong-wrong"}, {"Origin": "http://elsewhere:8005"}):
        assert http.post(DECIDE, json=body(), headers=headers).status_code == 401
        assert http.get("/api/corrections", headers=headers).status_code == 401
    assert not (run / DECISIONS_NAME).exists()
    assert http.post(DECIDE, json=body(), headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert len(decisions_in(run)) == 1


def test_only_a_decision_writes(run: Path, http: TestClient) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = files()
    for path in ("run", "pulse", "metrics", "guards", "corrections", "conversations?where=step-2"):
        assert http.get(f"/api/{path}").status_code == 200
    assert http.get(DECIDE).status_code == 405 and http.put(DECIDE, json=body()).status_code == 405
    assert files() == before
    decide(http)
    assert set(files()) - set(before) == {run / DECISIONS_NAME}
