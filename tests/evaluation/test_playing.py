"""The requests of an evaluation: the same for every tutor, and refused where the tutor is not what was asked for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import ConfigError, DeadlineExceeded, PolicyMismatch
from classroom_rl.evaluation.playing import make_requests
from classroom_rl.evaluation.run import evaluate
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.datasets import load_problems
from tests.support.evaluated_server import ScriptedServer, reviewed


def test_a_tutor_that_changes_while_it_is_measured_is_an_error(config: EvalConfig, server: ScriptedServer):
    server.version_after = 3
    with pytest.raises(PolicyMismatch, match="changed while it was measured"):
        evaluate(config)
    assert not (Path(config.logging.save_dir) / "metrics.json").exists()


def test_without_a_server_the_message_says_how_to_start_one(config: EvalConfig):
    config.server_url = "http://127.0.0.1:9"
    with pytest.raises(DeadlineExceeded, match=r"vllm_server.py.*server_url=null"):
        evaluate(config)


def test_a_server_with_another_sum_of_rewards_is_refused(config: EvalConfig, server: ScriptedServer):
    config.reward_weights = {"pedagogical": 1.0}
    evaluate(config)
    config.reward_weights = {"pedagogical": 1.0, "post_test": 0.5}
    with pytest.raises(ConfigError, match="sums up rewards by .* set reward_weights to the server's own"):
        evaluate(config)


def test_siblings_travel_with_the_requests(tmp_path: Path) -> None:
    row = {"problem": "p", "answer": "1", "siblings": [{"problem": "s", "answer": 2}]}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row))

    def material(source: DatasetSource):
        config = replace(EvalConfig(), num_samples_per_problem=2)
        (request,) = make_requests(load_problems([source]), config, "sampled", PolicyVersion(), "r")
        return request.post_test_material

    with_siblings = material(DatasetSource(str(path), sibling_problems_column="siblings"))
    assert [entry.siblings[0].answer for entry in with_siblings] == ["2", "2"]
    assert material(DatasetSource(str(path))) is None


def test_supervised_requests_differ_in_the_supervisor_alone(config: EvalConfig, server: ScriptedServer):
    server.review = reviewed
    config.samplings = ["sampled", "greedy", "supervised"]
    evaluate(config)
    requests = sorted(server.requests, key=lambda request: request.request_id.rpartition("-")[2])
    by_sampling = {
        name: [
            request.model_dump(exclude={"request_id", "supervised"})
            for request in requests
            if f"-{name}-" in request.request_id
        ]
        for name in config.samplings
    }
    assert by_sampling["sampled"] == by_sampling["supervised"] and len(by_sampling["sampled"]) == 3
    assert all(request.supervised == ("-supervised-" in request.request_id) for request in requests)


def test_a_server_without_a_supervisor_is_an_error(config: EvalConfig):
    config.samplings = ["sampled", "supervised"]
    with pytest.raises(ConfigError, match=r"not one message of the tutor was reviewed.*supervisor_model"):
        evaluate(config)
    assert not (Path(config.logging.save_dir) / "metrics.json").exists()
