"""vLLM's metrics of several engines in one process, for `/metrics`.

vLLM stores its metrics in the process's global registry, and each new engine removes those of earlier engines from it.
So here each engine has its own registry, and the label `role` distinguishes them.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import PrometheusStatLogger


def own_metrics() -> "type[PrometheusStatLogger]":
    """A class for one engine's `stat_loggers`: vLLM's metrics in a separate registry."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.perf import PerfMetricsProm

    registry = CollectorRegistry()

    class OwnPerformance(PerfMetricsProm):
        _counter_cls = staticmethod(partial(Counter, registry=registry))

    class OwnMetrics(PrometheusStatLogger):
        own_registry = registry
        _gauge_cls = staticmethod(partial(Gauge, registry=registry))
        _counter_cls = staticmethod(partial(Counter, registry=registry))
        _histogram_cls = staticmethod(partial(Histogram, registry=registry))
        _perf_metrics_cls = OwnPerformance

    return OwnMetrics


def metrics_of(engine: "AsyncLLM") -> list[Metric]:
    """The metrics of an engine that was started with `own_metrics`."""
    loggers = engine.logger_manager.stat_loggers if engine.logger_manager is not None else ()
    registries = (getattr(logger, "own_registry", None) for logger in loggers)
    return [metric for registry in registries if registry is not None for metric in registry.collect()]


def in_words(by_role: Mapping[str, Iterable[Metric]]) -> bytes:
    """The metrics of several roles in Prometheus's text format: each metric once, its samples labelled by role."""
    merged: dict[str, Metric] = {}
    for role, metrics in by_role.items():
        for metric in metrics:
            if metric.name not in merged:
                merged[metric.name] = copy(metric)
                merged[metric.name].samples = []
            samples = (sample._replace(labels={"role": role, **sample.labels}) for sample in metric.samples)
            merged[metric.name].samples += samples
    return generate_latest(_CollectedMetrics(merged.values()))


class _CollectedMetrics:
    """Collected metrics with the registry interface that `generate_latest` expects."""

    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)
