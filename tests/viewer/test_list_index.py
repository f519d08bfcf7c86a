"""Tests of lists of conversations on the page's routes: sets, columns, filters and order."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

import classroom_rl.viewer.list_index
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.problem import Problem
from classroom_rl.viewer.reader import _bin_edges
from tests.support.viewer_run import CONVERSATIONS, HOSTILE, LESSONS, client_on, conversation, listed, make_large_run


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
        answer = http.get("/api/conversations", params={"where": where, "limit": 100})
        assert len(answer.content) < 64 * 1024 and len(answer.json()["columns"]["id"]) == 100
    assert answer.json()["total"] == CONVERSATIONS
    assert len(http.get("/api/run").content) < 8 * 1024
