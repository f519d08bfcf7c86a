"""The tutor that answers a benchmark: behind an API, or on a running server."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import PolicyMismatch, ProviderFailure
from classroom_rl.evaluation.run import evaluate
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.server.client import ClassroomClient
from tests.evaluation.published.conftest import on_mathdial
from tests.support.configs import loaded
from tests.support.judge_endpoint import JudgeEndpoint, fails, judge_endpoint


def test_a_tutor_that_cannot_be_asked_stops_the_run(tmp_path: Path, mathdial: str):
    with judge_endpoint(lambda body, _: fails(401, "no such key")) as endpoint, pytest.raises(ProviderFailure):
        evaluate(on_mathdial(tmp_path / "run", mathdial, endpoint))
    assert not (tmp_path / "run/metrics.json").exists()


def on_server(folder: Path, path: str, endpoint: JudgeEndpoint, monkeypatch, policies: list[int]) -> EvalConfig:
    versions = iter(policies)
    health = lambda self: SimpleNamespace(policy=PolicyVersion("run", next(versions)))  # noqa: E731
    monkeypatch.setattr(ClassroomClient, "health", health)
    arguments = [f"benchmark.path={path}", f"logging.save_dir={folder}"]
    arguments.append(f"server_url={endpoint.url.removesuffix('/v1')}")
    return loaded("eval", "--config-name", "mathdial", *arguments)


def test_a_servers_answers_are_kept_by_its_policy(tmp_path: Path, mathdial: str, asking: JudgeEndpoint, monkeypatch):
    monkeypatch.setenv("CLASSROOM_TOKEN", "a-token-of-forty-characters-0123456789ab")
    for asked_in_all, policy in ((12, 1), (12, 1), (24, 2)):
        metrics = evaluate(on_server(tmp_path / "run", mathdial, asking, monkeypatch, [policy, policy]))
        assert len(asking.calls) == asked_in_all and metrics["policy"].endswith(str(policy))
    assert {call.body["model"] for call in asking.calls} == {"teacher"}
    assert {call.key for call in asking.calls} == {"a-token-of-forty-characters-0123456789ab"}


def test_a_tutor_that_changes_meanwhile_is_an_error(tmp_path: Path, mathdial: str, asking: JudgeEndpoint, monkeypatch):
    config = on_server(tmp_path / "run", mathdial, asking, monkeypatch, [1, 2])
    with pytest.raises(PolicyMismatch, match="changed while it was measured"):
        evaluate(config)
