"""The dashboard asks for what server and trainer export, and Prometheus is told of ports that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.metrics.loggers import StatLoggerManager

from classroom_rl.config.base import ServerConfig
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.engines.vllm.role_metrics import in_words, metrics_of, own_metrics
from classroom_rl.server.app import _set_call_gauges
from classroom_rl.system.gpu_figures import GpuUsage
from classroom_rl.trainer import prometheus
from classroom_rl.trainer.prometheus import TrainingMetrics
from tests.conftest import ROOT
from tests.trainer.test_prometheus import LINE

FOLDER = ROOT / "examples/monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
KEYWORDS = {"by", "on", "without", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset"}


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def names_in(query: str) -> set[str]:
    """The metrics of a query: what is no function, keyword, label, text or duration."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|on|without|ignoring)\s*\([^)]*\)', " ", query)
    return set(re.findall(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?![\w:]*\s*\()", bare)) - KEYWORDS


def labels_in(query: str) -> set[str]:
    """The labels that a query groups by."""
    groups = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", query)
    return {label.strip() for group in groups for label in group.split(",")}


def samples_of(text: str) -> dict[str, set[str]]:
    """The labels of each exported sample, by its name."""
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.fixture
def exported(http: TestClient, world: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """What a server with an engine and a judge behind an API exports, and a trainer on a GPU."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "spent_usd": 1.0, "reserved_usd": 0.0}
    _set_call_gauges("judge", SimpleNamespace(outcomes={("judge", "usable"): 1}, **usage))
    arguments = AsyncEngineArgs(model=str(world / "blank"), max_model_len=256)
    manager = StatLoggerManager(arguments.create_engine_config(), custom_stat_loggers=[own_metrics()])
    engine: Any = SimpleNamespace(logger_manager=manager)
    monkeypatch.setattr(prometheus, "gpu_usage", lambda: iter([GpuUsage(0, 1, 2, 0.5)]))
    trainer, registry = TrainingMetrics(16, flops_per_token=1.0, peak=1.0), CollectorRegistry()
    trainer.record(LINE)
    trainer.record(LINE | {"num_tokens": 6000.0})
    registry.register(trainer)
    texts = (http.get("/metrics").text, in_words({"teacher": metrics_of(engine)}).decode())
    return {
        name: labels
        for text in (*texts, generate_latest(registry).decode())
        for name, labels in samples_of(text).items()
    }


def test_every_metric_of_the_dashboard_is_exported(exported: dict[str, set[str]]) -> None:
    queried = {name for query in queries() for name in names_in(query)}
    assert len(queried) >= 20, "the names were found in the queries"
    assert queried <= set(exported)


def test_the_dashboard_groups_by_labels_that_the_metrics_have(exported: dict[str, set[str]]) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            of_metrics = set.union(*(exported[name] for name in names_in(target["expr"])))
            legend_labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert labels_in(target["expr"]) | legend_labels <= of_metrics, panel["title"]


def test_names_are_found_in_queries() -> None:
    query = 'sum by (role) (rate(vllm:hits_total{role="a_metric"}[5m])) / on (gpu) max(classroom_x) > 0.5 or b'
    assert names_in(query) == {"vllm:hits_total", "classroom_x", "b"} and labels_in(query) == {"role", "gpu"}


def test_prometheus_scrapes_the_ports_that_are_named() -> None:
    text = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    jobs = {job["job_name"]: job for job in yaml.safe_load(text)["scrape_configs"]}
    targets = {name: job["static_configs"][0]["targets"] for name, job in jobs.items()}
    override = re.search(r"logging\.metrics_port=(\d+)", text)[0]
    logging = load(TrainRLConfig, "train_rl", [override]).logging
    assert targets == {
        "classroom-server": [f"127.0.0.1:{ServerConfig().server_port}"],
        "classroom-trainer": [f"{logging.metrics_host}:{logging.metrics_port}"],
    }
    assert {job["authorization"]["credentials_file"] for job in jobs.values()} == {"classroom_token"}
