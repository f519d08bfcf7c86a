"""The metrics that a trainer serves to Prometheus: what they say of its steps, and who may read them."""

import socket
from types import SimpleNamespace

import pytest
import requests
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.system.gpu_figures import GpuUsage
from classroom_rl.system.processes import free_port
from classroom_rl.trainer import prometheus
from classroom_rl.trainer.prometheus import TrainingMetrics, metrics_port, training_metrics
from tests.support.waiting import wait_until

TOKEN = "0123456789abcdef-0123456789"
LINE = {
    "step": 1,
    "loss": 0.25,
    "reward": 0.5,
    "conversation/teacher_tokens": 50.0,
    "num_tokens": 4000.0,
    "seconds/rollout": 8.0,
    "seconds/judging": 3.0,
    "seconds/publish": 1.0,
    "seconds/train": 4.0,
}


def exported(metrics: TrainingMetrics) -> dict[tuple[str, str], float]:
    """The samples that Prometheus reads: by name and the value of their label."""
    registry = CollectorRegistry()
    registry.register(metrics)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_a_step_by_hand() -> None:
    metrics = TrainingMetrics(conversations=16)
    assert ("classroom_training_step",) not in exported(metrics), "no step was made"
    metrics.record(LINE)
    metrics.record({"step": 2, "loss": 0.75, "seconds/train": 2.0})  # again on the same batch
    assert exported(metrics) == {
        ("classroom_training_step",): 2,
        ("classroom_training_reward",): 0.5,
        ("classroom_training_loss",): 0.75,
        ("classroom_training_tokens_per_second",): 100.0,
        ("classroom_training_seconds_total", "play"): 5.0,
        ("classroom_training_seconds_total", "judging"): 3.0,
        ("classroom_training_seconds_total", "publish"): 1.0,
        ("classroom_training_seconds_total", "train"): 6.0,
        ("classroom_training_conversations_total",): 16,
        ("classroom_training_tokens_total",): 4000.0,
    }


def test_mfu_by_hand() -> None:
    """6 × 100 operations for each of 2,000 tokens in 4 s, of 1.2e6 that two GPUs could do in a second."""
    metrics = TrainingMetrics(16, flops_per_token=600, peak=1.2e6)
    metrics.record(LINE)
    assert ("classroom_training_mfu",) not in exported(metrics), "how many tokens are new is not known after a resume"
    metrics.record(LINE | {"num_tokens": 6000.0})
    assert exported(metrics)["classroom_training_mfu",] == pytest.approx(0.25)
    metrics.record({"step": 3, "loss": 0.5, "seconds/train": 2.0})
    assert exported(metrics)["classroom_training_mfu",] == pytest.approx(0.5), "the same tokens again, twice as fast"


def test_gpus_are_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [GpuUsage(0, 10, 80, 0.5), GpuUsage(1, None, 80, None)]
    monkeypatch.setattr(prometheus, "gpu_usage", lambda: iter(gpus))
    samples = exported(TrainingMetrics(16))
    assert samples["classroom_gpu_memory_used_bytes", "0"] == 10 and samples["classroom_gpu_memory_bytes", "1"] == 80
    assert samples["classroom_gpu_utilization", "0"] == 0.5
    assert ("classroom_gpu_utilization", "1") not in samples


@pytest.mark.parametrize(
    ("overrides", "gpu", "experts", "known"),
    [
        ([], "NVIDIA H100 80GB HBM3", None, 6),
        (["teacher_model.lora.enable=true"], "NVIDIA H100 80GB HBM3", None, 4),
        (["train.dtype=float32"], "NVIDIA H100 80GB HBM3", None, None),
        ([], "NVIDIA H100 80GB HBM3", 8, None),
        ([], "a GPU of next year", None, None),
    ],
)
def test_where_the_speed_is_known(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], gpu: str, experts: int | None, known: int | None
) -> None:
    config = load(TrainRLConfig, "train_rl", ["--config-name", "maths_small", *overrides])
    monkeypatch.setattr(prometheus, "read_shape", lambda name: SimpleNamespace(parameters=100))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    text = SimpleNamespace(num_experts_per_tok=experts)
    metrics = training_metrics(config, SimpleNamespace(get_text_config=lambda: text), processes=2)
    assert metrics._flops_per_token == (None if known is None else 100 * known)
    if known is not None:
        assert metrics._peak == pytest.approx(2 * 989.4e12)


def with_port(**logging: object) -> TrainRLConfig:
    keys = {"metrics_port": free_port(), **logging}
    return load(TrainRLConfig, "train_rl", [f"logging.{key}={value}" for key, value in keys.items()])


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def ask(config: TrainRLConfig, **headers: str) -> requests.Response:
    port = config.logging.metrics_port

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens)
    return requests.get(f"http://127.0.0.1:{port}/metrics", headers=headers, timeout=60)


def test_the_port_answers_until_the_training_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    config = with_port()
    with metrics_port(config) as registry:
        metrics = TrainingMetrics(16)
        registry.register(metrics)
        metrics.record(LINE)
        answer = ask(config)
        assert answer.status_code == 200 and "classroom_training_step 1.0" in answer.text
        assert ask(config, Host="evil.example").status_code == 403, "a page of another site"
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{config.logging.metrics_port}/metrics", timeout=60)


def test_with_a_token_a_request_needs_it(token: None) -> None:
    config = with_port()
    with metrics_port(config):
        assert ask(config).status_code == 401
        assert ask(config, Authorization=f"Bearer {TOKEN}").status_code == 200


def test_without_a_port_nothing_is_served() -> None:
    with metrics_port(load(TrainRLConfig, "train_rl", [])) as registry:
        assert registry is None


def test_other_machines_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with (
        pytest.raises(ConfigError, match="logging.metrics_host is 0.0.0.0, which other machines can reach"),
        metrics_port(with_port(metrics_host="0.0.0.0")),
    ):
        pass


def test_a_taken_port_is_refused_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    config = with_port()
    with metrics_port(config):
        ask(config)
        with pytest.raises(ConfigError, match="choose another port with logging.metrics_port="), metrics_port(config):
            pass


def test_server_and_trainer_need_two_ports() -> None:
    with pytest.raises(ConfigError, match="metrics_port and generation.server_port are both 8005"):
        load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", "logging.metrics_port=8005"], check_train_rl)
