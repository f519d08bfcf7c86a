"""Tests of the viewer's page, run and list routes on a run folder, without a browser and without a model."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

import classroom_rl.viewer.list_index
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.problem import Problem
from classroom_rl.server.view_only import create_viewer
from classroom_rl.viewer.metrics import RunMetrics
from classroom_rl.viewer.reader import _bin_edges
from classroom_rl.viewer.routes import STATIC, page_files
from tests.support.synthetic_run import step_line, write_training
from tests.support.viewer_run import (
    CONVERSATIONS,
    HOSTILE,
    LESSONS,
    add_guards,
    client_on,
    conversation,
    listed,
    make_large_run,
)

TOKEN = "0123456789abcdef-0123456789"


# The page --------------------------------------------------------------------------------------------------------


def test_the_page_comes_from_the_package_with_headers_that_let_nothing_else_in(http: TestClient) -> None:
    for path in page_files():
        answer = http.get(path)
        assert answer.status_code == 200 and answer.content
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        again = http.get(path, headers={"If-None-Match": answer.headers["ETag"]})
        assert again.status_code == 304 and not again.content
    assert http.get("/viewer/..%2froutes.py").status_code == 404
    assert http.get("/viewer/nothing.js").status_code == 404


def test_what_models_said_never_becomes_markup() -> None:
    for path in STATIC.iterdir():
        source = path.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|srcdoc", source
        )
        elsewhere = set(re.findall(r"https?://[^\s\"'`)]+", source)) - {"http://www.w3.org/2000/svg"}
        assert not elsewhere, f"{path.name} names {elsewhere}"
        assert len(source.splitlines()) < 500


def test_every_module_that_is_imported_is_there() -> None:
    for path in STATIC.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8")):
            assert f"/viewer/{name}" in page_files(), f"{path.name} imports {name}"


def test_with_a_token_the_page_loads_and_its_data_does_not(run: Path) -> None:
    http = client_on(run, TOKEN, "http://elsewhere:8005")
    assert all(http.get(path).status_code == 200 for path in page_files())
    assert http.post("/").status_code == 401
    for path in ("/api/run", "/api/pulse", "/api/metrics", "/api/conversations?where=step-1", "/openapi.json"):
        assert http.get(path).status_code == 401, path
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert http.get("/api/run", headers=right).json()["steps"] == [0, 1, 2]


def test_without_a_token_the_page_and_its_data_are_for_this_machine_s_names(run: Path) -> None:
    for name in ("127.0.0.1", "localhost", "[::1]"):
        assert client_on(run, base_url=f"http://{name}:8005").get("/api/run").status_code == 200
    elsewhere = client_on(run, base_url="http://rebound.example:8005")
    for path in (*page_files(), "/api/run", "/openapi.json"):
        refused = elsewhere.get(path)
        assert refused.status_code == 403 and "not under 'rebound.example:8005'" in refused.json()["detail"]
    allowed = TestClient(create_viewer(run, None, ["Rebound.example"]), base_url="http://rebound.example:8005")
    assert allowed.get("/api/run").status_code == 200


# The run ---------------------------------------------------------------------------------------------------------


def test_the_page_without_a_server_tells_its_health(http: TestClient, run: Path) -> None:
    assert http.get("/health").json() == {"status": "ok", "run_folder": str(run), "live": False}
    assert client_on(run, TOKEN).get("/health").status_code == 401


@pytest.mark.parametrize(
    ("environment", "said"), [("classroom", "tutor closes from message"), ("marooned", "own decisions at most")]
)
def test_max_turns_is_shown_as_what_it_means(run: Path, environment: str, said: str) -> None:
    write_training(run, [step_line(1, 0.5)], {"environment": environment, "generation": {"max_turns": 7}})
    assert dict(RunMetrics(run).facts())[said] == "7"


def test_the_run_tells_its_sets_its_configuration_and_why_there_is_no_chat(http: TestClient, run: Path) -> None:
    told = http.get("/api/run").json()
    assert told["steps"] == [0, 1, 2] and told["evaluations"] == ["before", "after"] and not told["live"]
    assert told["personas"] == ["correct_student", "error_student"]
    assert ["teacher", "no/such/model"] in told["facts"]
    assert not told["chat"]["on"] and f"logging.save_dir={run}" in told["chat"]["why"]
    refused = http.post("/api/chat", json={"problem": "fractions"})
    assert refused.status_code == 422 and refused.json()["detail"] == told["chat"]["why"]


def test_metrics_are_columns_over_steps_with_the_evaluations_as_marks(http: TestClient, run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 3, "reward": 0.9, "seconds/rollout": 1.0, "completions/clipped_ratio": 0.0}\n{"step": 4, "rew'
        )
    told = http.get("/api/metrics").json()
    assert told["steps"] == [1, 2, 3] and told["series"]["reward"] == [0.2, 0.4, 0.9]
    assert told["series"]["seconds/train"] == [1.0, 1.0, None] and told["max_steps"] == 4
    assert "completions/clipped_ratio" not in told["series"] and told["last"]["reward"] == 0.9
    means = {(mark["name"], mark["sampling"]): mark["mean"] for mark in told["marks"]}
    assert means["before", "sampled"] == pytest.approx(0.7 / 3) and means["after", "greedy"] == pytest.approx(0.5)


def test_the_last_figures_are_those_of_the_last_batch_though_it_is_trained_on_twice(
    http: TestClient, run: Path
) -> None:
    lines = [{"step": 1, "reward": 0.5, "judge/run_cost_usd": 2.5, "loss": 0.1}, {"step": 2, "loss": 0.2}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    last = http.get("/api/metrics").json()["last"]
    assert last == {"step": 2, "reward": 0.5, "judge/run_cost_usd": 2.5, "loss": 0.2}


def test_the_page_learns_of_an_evaluation_whose_figures_come_after_its_conversations(
    http: TestClient, run: Path
) -> None:
    metrics = (run / "eval" / "after" / "metrics.json").read_text()
    (run / "eval" / "after" / "metrics.json").unlink()
    before = http.get("/api/pulse").json()
    (run / "eval" / "after" / "metrics.json").write_text(metrics)
    after = http.get("/api/pulse").json()
    assert after["metrics"] != before["metrics"] and after["shelf"] == before["shelf"]


def test_a_long_training_is_thinned_and_its_last_step_kept(http: TestClient, run: Path) -> None:
    lines = [json.dumps({"step": step, "reward": 0.5}) + "\n" for step in range(1, 5001)]
    (run / "metrics.jsonl").write_text("".join(lines))
    steps = http.get("/api/metrics").json()["steps"]
    assert len(steps) == 400 and steps[0] == 1 and steps[-1] == 5000 and steps == sorted(set(steps))
    checks = [json.dumps({"step": step, "reward": 0.5, "guard/gap": 0.1}) + "\n" for step in range(7, 5001, 500)]
    (run / "metrics.jsonl").write_text("".join(lines + checks))
    told = http.get("/api/metrics").json()
    gaps = {step for step, gap in zip(told["steps"], told["series"]["guard/gap"], strict=True) if gap is not None}
    assert gaps == set(range(7, 5001, 500)) and told["steps"] == sorted(set(told["steps"]))


def test_the_guards_say_whether_it_learned_and_what_the_judge_s_checks_warned_of(http: TestClient, run: Path) -> None:
    nothing = {"verdict": None, "reasons": [], "steps": None, "checks": 0, "failed": 0, "warnings": []}
    before = http.get("/api/pulse").json()["metrics"]
    assert http.get("/api/guards").json() == nothing
    add_guards(run)
    assert http.get("/api/pulse").json()["metrics"] != before
    told = http.get("/api/guards").json()
    assert (told["verdict"], told["steps"]) == ("no evidence of learning", 3)
    assert (told["checks"], told["failed"]) == (2, 1)
    assert told["reasons"][0].startswith("The parameters did not move at all")
    assert told["warnings"] == [[2, "The judge can be fooled: b."], [2, "The judge may be being fooled: a."]]


def test_the_pulse_changes_with_what_is_written(http: TestClient, run: Path) -> None:
    before = http.get("/api/pulse").json()
    assert before["latest_step"] == 2 and before["playing"] == before["played"] == 0
    assert http.get("/api/pulse").json() == before
    write_rollouts(run, 3, 0, [conversation(3, 0, LESSONS[0])])
    after = http.get("/api/pulse").json()
    assert after["latest_step"] == 3 and after["shelf"] != before["shelf"] and after["metrics"] == before["metrics"]


# Lists -----------------------------------------------------------------------------------------------------------


def test_a_list_has_columns_of_one_length_and_neither_tokens_nor_messages(http: TestClient) -> None:
    page = listed(http)
    assert page["total"] == page["matching"] == 8 and page["personas"] == ["correct_student", "error_student"]
    assert {len(column) for column in page["columns"].values()} == {8}
    assert page["columns"]["reward"] == [0.2, 0.3, None, 0.5] * 2
    assert page["columns"]["title"][0] == "Lesson: at the market · Plan: you, brother"
    assert page["columns"]["personas"][1] == {"correct_student": 1, "error_student": 1}
    assert sum(page["histogram"]) == 6 and page["mean"] == pytest.approx(1 / 3)
    assert page["edges"] == [round(0.05 * i, 2) for i in range(21)]
    assert not {"turns", "completion_ids", "mask", "logprobs", "prompt_ids", "problem"} & set(page["columns"])


@given(st.lists(st.floats(-1e6, 1e6).map(lambda reward: round(reward, 4)), max_size=30))
def test_a_histogram_holds_every_reward_and_has_an_edge_at_0(rewards: list[float]) -> None:
    edges = _bin_edges(rewards)
    assert edges[0] <= min([0, *rewards]) and edges[-1] >= max([1, *rewards]) and 0 in edges
    assert 8 <= len(edges) - 1 <= 22 and edges == sorted(set(edges))


@pytest.mark.parametrize(
    ("query", "rewards"),
    [
        ({"low": 0.3}, [0.3, 0.5, 0.3, 0.5]),
        ({"high": 0.2}, [0.2, 0.2]),
        ({"low": 0.25, "high": 0.4}, [0.3, 0.3]),
        ({"problem": "A WALK"}, [0.2, 0.3, None, 0.5]),
        ({"problem": Problem.of(LESSONS[0]).id}, [0.2, 0.3, None, 0.5]),
        ({"problem": "nowhere"}, []),
        ({"persona": "error_student"}, [0.3, 0.5, 0.3, 0.5]),
        ({"judge": "failed"}, [None, None]),
        ({"judge": "unrewarded"}, [None, None]),
        ({"sort": "best"}, [0.5, 0.5, 0.3, 0.3, 0.2, 0.2, None, None]),
        ({"sort": "worst", "limit": 3}, [0.2, 0.2, 0.3]),
        ({"sort": "worst", "limit": 3, "offset": 6}, [None, None]),
        ({"persona": "error_student", "problem": "market", "low": 0.4}, [0.5]),
    ],
)
def test_filters_and_order(http: TestClient, query: dict, rewards: list) -> None:
    assert listed(http, **query)["columns"]["reward"] == rewards


def test_rejected_ones_and_samplings_can_be_had_alone(http: TestClient) -> None:
    assert listed(http, where="step-0", judge="rejected")["columns"]["reward"] == [0.1] * 4
    evaluation = listed(http, where="eval-before")
    assert evaluation["total"] == 9 and evaluation["samplings"] == ["sampled", "greedy"]
    assert listed(http, where="eval-before", sampling="greedy")["matching"] == 1
    assert listed(http, where="training")["total"] == 3 * 8 + len(HOSTILE)


@pytest.mark.parametrize("where", ["step-9", "step-1/../0", "eval-../../etc", "eval-nothing", "", "rollouts", "step-"])
def test_a_set_that_is_not_there_is_404_and_says_which_are(http: TestClient, where: str) -> None:
    answer = http.get("/api/conversations", params={"where": where})
    assert answer.status_code == 404 and "step-2" in answer.json()["detail"]


@pytest.mark.parametrize("query", [{"limit": 201}, {"limit": 0}, {"offset": -1}, {"sort": "by magic"}, {"low": "x"}])
def test_a_query_that_breaks_a_rule_is_422(http: TestClient, query: dict) -> None:
    assert http.get("/api/conversations", params={"where": "step-1", **query}).status_code == 422


def test_a_file_is_read_again_only_when_it_has_changed(http: TestClient, run: Path, monkeypatch) -> None:
    assert listed(http)["total"] == 8
    with monkeypatch.context() as context:
        context.setattr(classroom_rl.viewer.list_index.pq, "ParquetFile", None)
        assert listed(http, low=0.3)["matching"] == 4
    write_rollouts(run, 1, 0, [conversation(1, 0, LESSONS[0])])
    assert listed(http)["total"] == 1


def test_ranks_of_a_step_make_one_set(http: TestClient, run: Path) -> None:
    write_rollouts(run, 1, 1, [conversation(1, 9, LESSONS[0], request_id="run-step000001-rank1of2-abcd")])
    assert listed(http)["total"] == 9


def test_ten_thousand_conversations_are_listed_in_a_bounded_page(tmp_path: Path) -> None:
    run = make_large_run(tmp_path / "run")
    http = client_on(run)
    for where in ("step-39", "training"):
        started = time.monotonic()
        answer = http.get("/api/conversations", params={"where": where, "limit": 100})
        seconds, size = time.monotonic() - started, len(answer.content)
        print(f"{where}: {answer.json()['total']} conversations, {seconds:.2f} s, {size} bytes")
        assert len(answer.content) < 64 * 1024 and len(answer.json()["columns"]["id"]) == 100
    assert answer.json()["total"] == CONVERSATIONS
    assert len(http.get("/api/run").content) < 8 * 1024
