"""OpenTelemetry spans: one trace for each conversation, with its messages, reviews and judge calls, made from the
events of the journal as they are written.

Off unless the environment variable OTEL_EXPORTER_OTLP_ENDPOINT is set and the packages of the extra `opentelemetry` are
installed. A span begins where the conversation waited for it to begin: with the event before it, or for a judge call
with the end of the dialogue, because judge calls run at the same time. So waiting for an engine is a part of it.
"""

import importlib.util
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from classroom_rl.rollout.store.journal import request_of

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SPANS = {"turn", "draft", "review", "verdict", "solutions", "grades", "post_test"}
"""The events that take time."""
_REQUESTS_IN_MEMORY = 8


@dataclass
class _Trace:
    """The spans of an unfinished conversation: name, start, end (seconds since 1970), attributes."""

    started: float
    spans: list[tuple[str, float, float, dict[str, Any]]] = field(default_factory=list)

    def start_of(self, event: str) -> float:
        """When the span of an event that comes now began."""
        end_times = [end for name, _, end, _ in self.spans if event != "verdict" or name != "verdict"]
        return end_times[-1] if end_times else self.started


class ConversationSpans:
    """Takes the events of a journal, and gives a tracer the trace of each conversation that has ended."""

    def __init__(self, tracer: "Tracer"):
        self._tracer = tracer
        self._requests: OrderedDict[str, tuple[float, dict[str, _Trace]]] = OrderedDict()

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event, with its fields as they were given to the journal."""
        name, time = event["event"], event["time"]
        if name == "batch":
            self._requests[event["request"]] = (time, {})
            self._requests.move_to_end(event["request"])
            while len(self._requests) > _REQUESTS_IN_MEMORY:
                self._requests.popitem(last=False)
        conversation = event.get("conversation")
        began, traces = self._requests.get(request_of(conversation), (0.0, None)) if conversation else (0.0, None)
        if traces is None:
            return
        trace = traces.setdefault(conversation, _Trace(began))
        if name in _SPANS:
            trace.spans.append((name, trace.start_of(name), time, _attributes(name, event)))
        elif name == "conversation":
            del traces[conversation]
            self._export(conversation, trace, time, event["record"])

    def _export(self, conversation: str, trace: _Trace, ended: float, record: Mapping[str, Any]) -> None:
        from opentelemetry.trace import set_span_in_context

        values = {name: record.get(name) for name in ("step", "problem_id", "reward")}
        attributes = {
            "conversation": conversation,
            **{name: value for name, value in values.items() if value is not None},
        }
        root = self._tracer.start_span("conversation", start_time=_nanoseconds(trace.started), attributes=attributes)
        context = set_span_in_context(root)
        for name, start, end, span_attributes in trace.spans:
            span = self._tracer.start_span(name, context, start_time=_nanoseconds(start), attributes=span_attributes)
            span.end(_nanoseconds(end))
        root.end(_nanoseconds(ended))


def _attributes(name: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of an event: numbers and names, no text of a conversation."""
    fields = {
        "turn": ("role", "tokens", "persona", "replaced"),
        "draft": ("tokens",),
        "review": ("valid", "category"),
        "verdict": ("rule", "attempt", "accepted", "error"),
    }.get(name, ())
    values = {field: getattr(event[name], field, None) for field in fields}
    review = getattr(event[name], "review", None)
    if review is not None and review.valid is not None:
        values["review"] = review.category or "valid"
    return {field: value for field, value in values.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def spans_of_environment() -> tuple[ConversationSpans, Any] | None:
    """Return the spans that are sent to OTEL_EXPORTER_OTLP_ENDPOINT, by HTTP, and their provider, which has to be shut
    down; None if that is not set, or the packages are missing."""
    if not os.environ.get(ENDPOINT_VARIABLE):
        return None
    try:
        installed = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") and importlib.util.find_spec(
            "opentelemetry.sdk.trace"
        )
    except ModuleNotFoundError:
        installed = None
    if not installed:
        logger.warning("%s is set, but OpenTelemetry is missing: pip install '.[opentelemetry]'", ENDPOINT_VARIABLE)
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "classroom-server")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return ConversationSpans(provider.get_tracer("classroom_rl")), provider
