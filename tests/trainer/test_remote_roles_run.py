"""Real programs with models behind HTTP: GRPO with a remote student, and an evaluation of a remote teacher."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from classroom_rl.results.evaluation_files import read_records
from classroom_rl.results.rollout_files import read_records as read_rollouts
from tests.conftest import ROOT, RunningServer, running_server
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, fails, judge_endpoint, says


class Provider:
    """Answers so many more requests and is then down."""

    def __init__(self):
        self.answers_left = 10**6

    def __call__(self, body: dict, nth: int) -> Behaviour:
        self.answers_left -= 1
        return says(f"I goed home {nth} .") if self.answers_left >= 0 else fails(503, "maintenance")


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def endpoint(provider: Provider) -> Iterator[JudgeEndpoint]:
    with judge_endpoint(provider) as running:
        yield running


def eval_command(world: Path, folder: Path, url: str, *overrides: str) -> list[str]:
    roles = (
        f"{role}_model.{key}"
        for role in ("teacher", "student")
        for key in (f"base_url={url}", f"model_name_or_path=a-{role}", "deadline_s=3")
    )
    return [
        *(sys.executable, "eval.py", "--config-name", "quickstart", "server_url=null", *roles),
        *(f"dataset.eval_datasets=[{{name_or_path: {world / 'lessons_heldout.jsonl'}}}]", "samplings=[sampled]"),
        *("dataset.max_val_examples=2", f"logging.save_dir={folder}", *overrides),
    ]


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_eval_measures_a_teacher_behind_an_api_and_goes_on_after_a_stop(world, tmp_path, provider, endpoint) -> None:
    """Two lessons, two conversations each, of nine messages: 20 of the teacher's and 16 of the student's."""
    provider.answers_left = 15
    stopped = run(eval_command(world, tmp_path / "eval", endpoint.url))
    assert stopped.returncode == 2 and "_model.deadline_s = 3 s; the last failure: 503: maintenance" in stopped.stderr
    assert "Traceback" not in stopped.stderr and not (tmp_path / "eval" / "metrics.json").exists()
    provider.answers_left = 10**6
    done = run(eval_command(world, tmp_path / "eval", endpoint.url))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(endpoint.of("says")) == 36, "what was answered before the stop was not asked again"
    metrics = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    assert metrics["tutor"] == "a-teacher" and metrics["engine"] == {"name": "api", "version": f"{endpoint.url}/"}
    assert metrics["sampled"]["conversations"] == 4
    records = read_records(tmp_path / "eval" / "conversations.parquet")["sampled"]
    assert [len(record.turns) for record in records] == [9] * 4 and records[0].prompt_ids == []
    assert {call.body["model"] for call in endpoint.calls} == {"a-teacher", "a-student"}


@pytest.fixture
def server(world: Path, endpoint: JudgeEndpoint, tmp_path: Path) -> Iterator[RunningServer]:
    overrides = (
        "student_model.model_name_or_path=a-student",
        f"student_model.base_url={endpoint.url}",
        "student_model.deadline_s=8",
        "logging.save_steps=100",
    )
    with running_server(world, tmp_path / "run", *overrides) as running:
        yield running


@pytest.mark.full
def test_grpo_with_a_student_behind_an_api_stops_without_it_and_pays_for_nothing_twice(server, provider, endpoint):
    """About two student turns in each of 16 conversations of a batch; in the second batch the student goes away."""
    health = server.client.health()
    assert (health.roles["teacher"].engine, health.roles["student"].engine) == ("vllm", "api")
    provider.answers_left = 32 + 10
    stopped = train(server, steps=2)
    assert stopped.returncode == 2, stopped.stderr[-3000:]
    assert "did not answer within student_model.deadline_s = 8 s; the last failure: 503: maintenance" in stopped.stderr
    assert [path.name for path in (server.run_folder / "checkpoints").glob("checkpoint-*")] == ["checkpoint-1"]
    assert len(endpoint.of("says")) == 42

    provider.answers_left = 10**6
    resumed = train(server, steps=2)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    files = sorted((server.run_folder / "rollouts").glob("*.parquet"))
    turns = [turn for path in files for record in read_rollouts(path) for turn in record.turns]
    assert len(endpoint.of("says")) == sum(turn.role == "student" for turn in turns) > 50
    assert "student answered for $" in resumed.stdout
    lines = [json.loads(line) for line in (server.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["mismatch/mean_abs_logprob_diff"] < 0.002 for line in lines)
    assert sum(line["student/cost_usd"] for line in lines) == pytest.approx(endpoint.billed_usd)
    text = requests.get(f"{server.client.url}/metrics", timeout=60).text
    assert 'classroom_student_calls{model="a-student",outcome="usable"}' in text
    calls_by_model = Counter(call.body["model"] for call in endpoint.calls)
    assert set(calls_by_model) == {"a-student"}


def train(server: RunningServer, steps: int) -> subprocess.CompletedProcess:
    return run([sys.executable, "train_rl.py", *server.overrides, f"train.max_steps={steps}"])
