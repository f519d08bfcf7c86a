"""Tests of a run's metrics, guards and settings on the page's routes."""

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from classroom_rl.viewer.metrics import RunMetrics
from tests.support.synthetic_run import step_line, write_training
from tests.support.viewer_run import add_guards


@pytest.mark.parametrize(
    ("environment", "said"), [("classroom", "tutor closes from message"), ("marooned", "own decisions at most")]
)
def test_max_turns_is_shown_as_what_it_means(run: Path, environment: str, said: str) -> None:
    write_training(run, [step_line(1, 0.5)], {"environment": environment, "generation": {"max_turns": 7}})
    assert dict(RunMetrics(run).facts())[said] == "7"


def test_metrics_are_columns_over_steps_with_the_evaluations_as_marks(http: TestClient, run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 3, "reward": 0.9, "seconds/rollout": 1.0, "completions/clipped_ratio": 0.0}\n{"step": 4, "rew'
        )
    metrics = http.get("/api/metrics").json()
    assert metrics["steps"] == [1, 2, 3] and metrics["series"]["reward"] == [0.2, 0.4, 0.9]
    assert metrics["series"]["seconds/train"] == [1.0, 1.0, None] and metrics["max_steps"] == 4
    assert "completions/clipped_ratio" not in metrics["series"] and metrics["last"]["reward"] == 0.9
    means = {(mark["name"], mark["sampling"]): mark["mean"] for mark in metrics["marks"]}
    assert means["before", "sampled"] == pytest.approx(0.7 / 3) and means["after", "greedy"] == pytest.approx(0.5)


def test_the_time_of_steps_comes_with_advice(http: TestClient, run: Path) -> None:
    metrics = http.get("/api/metrics").json()
    assert metrics["time_shares"]["play"] == pytest.approx(2.0 / 3.25) and metrics["time_advice"] is None
    train = {"max_staleness": 0, "importance_sampling_correction": True}
    write_training(run, [step_line(1, 0.5, **{"seconds/judging": 1.5})], {"train": train})
    (run / "config" / "train_rl.environment.json").write_text('{"placement": "split"}')
    metrics = http.get("/api/metrics").json()
    assert metrics["time_shares"]["play"] == pytest.approx(0.5 / 3.25)
    assert metrics["time_advice"].startswith("The engines wait 38 % of a step: set train.max_staleness=1")


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
    metrics = http.get("/api/metrics").json()
    gaps = {step for step, gap in zip(metrics["steps"], metrics["series"]["guard/gap"], strict=True) if gap is not None}
    assert gaps == set(range(7, 5001, 500)) and metrics["steps"] == sorted(set(metrics["steps"]))


def test_the_guards_say_whether_it_learned_and_what_the_judge_s_checks_warned_of(http: TestClient, run: Path) -> None:
    nothing = {"verdict": None, "reasons": [], "steps": None, "checks": 0, "failed": 0, "warnings": []}
    before = http.get("/api/pulse").json()["metrics"]
    assert http.get("/api/guards").json() == nothing
    add_guards(run)
    assert http.get("/api/pulse").json()["metrics"] != before
    guards = http.get("/api/guards").json()
    assert (guards["verdict"], guards["steps"]) == ("no evidence of learning", 3)
    assert (guards["checks"], guards["failed"]) == (2, 1)
    assert guards["reasons"][0].startswith("The parameters did not move at all")
    assert guards["warnings"] == [[2, "The judge can be fooled: b."], [2, "The judge may be being fooled: a."]]
