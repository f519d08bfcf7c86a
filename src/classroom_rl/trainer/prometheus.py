"""The metrics of a training for Prometheus, on a port of the main process (`logging.metrics_port`)."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.memory.sources import NotEstimated, read_shape
from classroom_rl.results.run_folder import is_number
from classroom_rl.results.step_time import PHASES, sampled_tokens_per_second, seconds_by_phase
from classroom_rl.server.auth import token_for
from classroom_rl.system.gpu_figures import gpu_usage, peak_flops, training_flops
from classroom_rl.system.processes import refuse_taken_port

_GAUGES = {
    "step": "Optimizer steps that were made",
    "reward": "Mean reward of the last batch",
    "loss": "Loss of the last step",
    "tokens_per_second": "Tokens that the policy sampled in the last batch, by the seconds of its rollout",
    "mfu": "Share of the GPUs' dense 16-bit operations that training used in the last step. Counts prompts and samples",
}
_SHUTDOWN_S = 5.0


class TrainingMetrics:
    """Collects the metrics of a training, for `prometheus_client`: a registry asks it whenever Prometheus does.

    Args:
        conversations: of a batch.
        flops_per_token: operations for each token that is trained on; None leaves out `classroom_training_mfu`, as
            `peak` does.
        peak: operations that all GPUs of the training together can do in a second.
    """

    def __init__(self, conversations: int, flops_per_token: float | None = None, peak: float | None = None):
        self._conversations, self._flops_per_token, self._peak = conversations, flops_per_token, peak
        self._values: dict[str, float] = {}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._played = 0
        self._tokens: float | None = None
        self._batch_tokens: float | None = None

    def record(self, line: Mapping[str, Any]) -> None:
        """Take in a step's line of `metrics.jsonl`."""
        values = {name: float(line[name]) for name in ("step", "reward", "loss") if is_number(line.get(name))}
        for phase, seconds in seconds_by_phase(line).items():
            self._seconds[phase] += seconds
        if "seconds/rollout" in line:  # the first step on a batch
            self._played += self._conversations
            values["tokens_per_second"] = sampled_tokens_per_second(line, self._conversations)
        if "num_tokens" in line:
            # Of the first batch after a resume it is not known: the count is of the whole run.
            self._batch_tokens = None if self._tokens is None else line["num_tokens"] - self._tokens
            self._tokens = line["num_tokens"]
        if self._batch_tokens and self._flops_per_token and self._peak and line.get("seconds/train"):
            flops = self._flops_per_token * self._batch_tokens
            values["mfu"] = flops / line["seconds/train"] / self._peak
        self._values |= values

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now; those that are not known are left out."""
        for name, text in _GAUGES.items():
            if name in self._values:
                yield GaugeMetricFamily(f"classroom_training_{name}", text, self._values[name])
        seconds = CounterMetricFamily("classroom_training_seconds", "Seconds of the steps, by phase", labels=["phase"])
        for phase, value in self._seconds.items():
            seconds.add_metric([phase], value)
        yield seconds
        yield CounterMetricFamily("classroom_training_conversations", "Conversations of the batches", self._played)
        if self._tokens is not None:
            text = "Tokens of prompts and of the policy's messages, since the run began"
            yield CounterMetricFamily("classroom_training_tokens", text, self._tokens)
        yield from _gpu_metrics()


def _gpu_metrics() -> Iterator[Metric]:
    used = GaugeMetricFamily("classroom_gpu_memory_used_bytes", "GPU memory in use by all programs", labels=["gpu"])
    memory = GaugeMetricFamily("classroom_gpu_memory_bytes", "GPU memory", labels=["gpu"])
    busy = GaugeMetricFamily(
        "classroom_gpu_utilization", "Share of the last second in which the GPU computed", labels=["gpu"]
    )
    for gpu in gpu_usage():
        for family, value in ((used, gpu.memory_used), (memory, gpu.memory), (busy, gpu.utilization)):
            if value is not None:
                family.add_metric([str(gpu.index)], value)
    yield from (family for family in (used, memory, busy) if family.samples)


def training_metrics(config: TrainRLConfig, model_config: Any, processes: int) -> TrainingMetrics:
    """The metrics of a training of a model on so many processes, each with a GPU of the same kind. Without MFU for a
    mixture of experts, for arithmetic in 32 bits, and on GPUs whose speed is not known."""
    train = config.train
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() and train.dtype != "float32" else None
    is_mixture = getattr(model_config.get_text_config(), "num_experts_per_tok", None) is not None
    flops_per_token = None
    if peak is not None and not is_mixture:
        flops_per_token = _flops_per_token(config)
    conversations = train.number_of_problems_per_batch * train.num_samples_per_problem
    return TrainingMetrics(conversations, flops_per_token, peak and peak * processes)


def _flops_per_token(config: TrainRLConfig) -> float | None:
    try:
        parameters = read_shape(config.policy_model.model_name_or_path).parameters
    except NotEstimated:
        return None
    return training_flops(parameters, config.policy_model.adapter is not None)


@contextmanager
def metrics_port(config: TrainRLConfig) -> Iterator[CollectorRegistry | None]:
    """Serve `GET /metrics` on `logging.metrics_port` inside of the block, with the checks of the server's requests;
    nothing if the port is null.

    Yields:
        The registry that is served; None without a port.

    Raises:
        ConfigError: if the port is taken, or other machines reach it and there is no token.
    """
    host, port = config.logging.metrics_host, config.logging.metrics_port
    if port is None:
        yield None
        return
    import uvicorn
    from fastapi import FastAPI, Response

    from classroom_rl.server.app import uvicorn_options
    from classroom_rl.server.middleware import add_request_checks

    token = token_for(host, "logging.metrics_host")
    refuse_taken_port(host, port, "logging.metrics_port")
    registry, app = CollectorRegistry(), FastAPI(title="Classroom trainer", openapi_url=None)
    add_request_checks(app, token, config.generation.allowed_hosts)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    server = uvicorn.Server(uvicorn_options(app, host, port))
    thread = threading.Thread(target=server.run, name="metrics", daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.should_exit = True
        thread.join(_SHUTDOWN_S)
