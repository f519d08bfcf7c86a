"""Real programs with a judge over HTTP that refuses requests or goes down: which programs stop, with which error, and
what is stored."""

import json
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from classroom_rl.errors import ProviderFailure, SpendingCapReached
from classroom_rl.rollout.engine import Usage
from classroom_rl.server.client import _ERRORS
from tests.conftest import ROOT, RunningServer, running_server
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, fails, judge_endpoint, says

pytestmark = pytest.mark.full  # whole runs of server and trainer, minutes


def test_what_stops_a_run_keeps_its_name_over_http():
    assert all(_ERRORS[error.status] is error for error in (ProviderFailure, SpendingCapReached))
    assert len({error.status for error in _ERRORS.values()}) == len(_ERRORS)


class Judge:
    """What the endpoint does: `refuse` with a status, or answer so many more requests and then be down."""

    def __init__(self):
        self.refuse: Behaviour | None = None
        self.answers_left = 10**6

    def __call__(self, body: dict, nth: int) -> Behaviour:
        if self.refuse is not None:
            return self.refuse
        self.answers_left -= 1
        if self.answers_left < 0:
            return fails(503, "maintenance")
        share = zlib.crc32(body["messages"][0]["content"].encode()) % 11 / 10
        scores = {"task_final_score": share, "forward_progression_score": 1 - share, "overall_momentum_score": 5}
        return says(json.dumps(scores))


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="module")
def endpoint(judge: Judge) -> Iterator[JudgeEndpoint]:
    with judge_endpoint(judge) as running:
        yield running


@pytest.fixture(scope="module")
def judged(world: Path, endpoint: JudgeEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("judged")
    rule = folder / "judge.txt"
    rule.write_text("{{ problem }}\n{% for turn in conversation %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}")
    overrides = (
        "judge_model.model_name_or_path=judge",
        f"judge_model.base_url={endpoint.url}",
        "judge_model.deadline_s=8",
        f"generation.judges_rules_prompts_paths={{pedagogical_eval: {rule}}}",
        "generation.number_judge_attempts=2",
        "logging.save_steps=100",
    )
    with running_server(world, folder / "run", *overrides) as running:
        yield running


def train(server: RunningServer, processes: int, steps: int) -> subprocess.CompletedProcess:
    launch = ("-m", "accelerate.commands.launch", "--config_file", "config/accelerate/1CPU.yaml")
    ranks = ("--num_processes", str(processes))
    command = [sys.executable, *launch, *ranks, "train_rl.py", *server.overrides, f"train.max_steps={steps}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (fails(401, "No auth credentials found"), "401: No auth credentials found"),
        (fails(404, "No endpoints found for judge"), "404: No endpoints found for judge"),
    ],
)
def test_a_judge_that_turns_us_away_stops_the_run_before_any_weight_is_changed(judged, judge, refusal, words):
    judge.refuse = refusal
    result = train(judged, processes=1, steps=2)
    judge.refuse = None
    assert result.returncode != 0 and words in result.stderr, result.stderr[-3000:]
    assert not (judged.run_folder / "metrics.jsonl").exists()
    assert not list(judged.run_folder.glob("checkpoints/*")) and not (judged.run_folder / "model").exists()
    assert judged.client.health().policy.version == 0


def test_a_judge_that_stays_down_stops_all_ranks_with_a_checkpoint_and_no_reply_is_paid_for_twice(
    judged, judge, endpoint
):
    """Two batches are judged, of 16 conversations with two attempts each; in the third the judge goes down."""
    judge.answers_left = 2 * 32 + 10
    stopped = train(judged, processes=2, steps=3)
    assert stopped.returncode != 0
    assert "did not answer within judge_model.deadline_s = 8 s; the last failure: 503: maintenance" in stopped.stderr
    assert len(endpoint.of("says")) == 2 * 32 + 10
    assert steps_logged(judged) == [1, 2] and judged.client.health().policy.version == 2
    assert [path.name for path in (judged.run_folder / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"]

    judge.answers_left = 10**6
    resumed = train(judged, processes=2, steps=3)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert steps_logged(judged) == [1, 2, 3] and "judged for $" in resumed.stdout
    paid = Counter(call.prompt for call in endpoint.of("says"))
    assert set(paid.values()) == {2}, "two attempts for each conversation"
    lines = [json.loads(line) for line in (judged.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["judge/cost_usd"] for line in lines) == pytest.approx(endpoint.billed_usd)
    assert lines[-1]["judge/run_cost_usd"] == pytest.approx(endpoint.billed_usd)


def steps_logged(server: RunningServer) -> list[int]:
    return [json.loads(line)["step"] for line in (server.run_folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_tell_what_judging_cost(judged, endpoint):
    text = requests.get(f"{judged.client.url}/metrics", timeout=60).text
    values = dict(re.findall(r"^(classroom_judge_\S+) (\S+)$", text, re.MULTILINE))
    counts = Counter(call.behaviour for call in endpoint.calls)
    assert float(values['classroom_judge_calls{model="judge",outcome="usable"}']) == counts["says"]
    assert float(values['classroom_judge_calls{model="judge",outcome="503"}']) == counts["503"] > 0
    assert float(values['classroom_judge_usd{state="spent"}']) == pytest.approx(endpoint.billed_usd)
    assert float(values['classroom_judge_tokens{kind="prompt"}']) == sum(call.prompt_tokens for call in endpoint.calls)


def test_ranks_add_up():
    from classroom_rl.trainer.sample_batch import usage_metrics

    ranks = [Usage(3, 1, 1, {"500": 1}, 100, 10, 0.5, 0.25, 4.0), None, Usage(2, 0, 0, {}, 50, 5, 0.25, 0.0, 4.5)]
    assert usage_metrics("judge", ranks) == {
        "judge/calls": 5,
        "judge/failed_calls": 1,
        "judge/unusable_replies": 1,
        "judge/tokens": 165,
        "judge/cost_usd": 0.75,
        "judge/reserved_usd": 0.25,
        "judge/run_cost_usd": 4.5,
    }
    assert usage_metrics("student", [None]) == {}
