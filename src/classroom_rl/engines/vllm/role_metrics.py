"""vLLM's metrics of several engines in one process, for `/metrics`.

vLLM keeps its metrics in the process's registry, from which each new engine removes those of the engines before it.
Here each engine has a registry of its own, and the label `role` tells them apart.
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
    """A class for the `stat_loggers` of one engine: vLLM's metrics in a registry of their own."""
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
    """The metrics of several roles in Prometheus's format: each metric once, its samples with their role."""
    found: dict[str, Metric] = {}
    for role, metrics in by_role.items():
        for metric in metrics:
            if metric.name not in found:
                found[metric.name] = copy(metric)
                found[metric.name].samples = []
            samples = (sample._replace(labels={"role": role, **sample.labels}) for sample in metric.samples)
            found[metric.name].samples += samples
    return generate_latest(_Found(found.values()))


class _Found:
    """Collected metrics, as a registry that `generate_latest` takes."""

    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)
