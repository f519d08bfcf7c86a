"""OpenTelemetry spans: one trace for each conversation, with the times of the journal, and no text of anybody."""

import json

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.server import spans
from classroom_rl.server.spans import ENDPOINT_VARIABLE, ConversationSpans, spans_of_environment
from tests.support.scripted_room import Room
from tests.support.turned_clock import run

REQUEST = SampleRequest(problems=["fractions", "sums"], answers=["1/2", "7"], request_id="r", seed=1, step=3)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def taken(exporter: InMemorySpanExporter) -> ConversationSpans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return ConversationSpans(provider.get_tracer("test"))


def test_each_conversation_is_a_trace(
    room: Room, generation, exporter: InMemorySpanExporter, taken: ConversationSpans
) -> None:
    service = room.open(generation)
    service.journal.on_event = taken.take
    response = run(service.sample(REQUEST))
    finished = exporter.get_finished_spans()
    roots = {span.attributes["conversation"]: span for span in finished if span.parent is None}
    assert roots.keys() == {record.id for record in response.conversations}
    for record in response.conversations:
        root = roots[record.id]
        children = [span for span in finished if span.parent and span.parent.span_id == root.context.span_id]
        turns = [span.attributes["role"] for span in children if span.name == "turn"]
        assert turns == [turn.role for turn in record.turns]
        assert [span.attributes["rule"] for span in children if span.name == "verdict"] == ["pedagogical_eval"]
        assert root.attributes["reward"] == record.reward and root.attributes["step"] == 3
        assert sum(span.attributes.get("tokens", 0) for span in children) == sum(turn.tokens for turn in record.turns)
        assert all(root.start_time <= span.start_time <= span.end_time <= root.end_time for span in children)
    assert "hello" not in json.dumps([dict(span.attributes) for span in finished]).lower(), "what was said stays here"


class Verdict:
    rule, attempt, accepted, error = "leak", 0, True, None


class Turn:
    role, tokens, persona, replaced, review = "teacher", 7, None, False, None


def test_times_are_those_of_the_events(exporter: InMemorySpanExporter, taken: ConversationSpans) -> None:
    """Two judge calls that run at the same time both begin with the end of the dialogue."""
    taken.take({"event": "batch", "time": 100.0, "request": "r"})
    taken.take({"event": "turn", "time": 102.0, "conversation": "r-0000", "turn": Turn})
    taken.take({"event": "turn", "time": 105.0, "conversation": "r-0000", "turn": Turn})
    taken.take({"event": "verdict", "time": 109.0, "conversation": "r-0000", "verdict": Verdict})
    taken.take({"event": "verdict", "time": 110.0, "conversation": "r-0000", "verdict": Verdict})
    taken.take({"event": "rewards", "time": 110.0, "conversation": "r-0000", "rewards": {}})
    assert exporter.get_finished_spans() == ()
    taken.take({"event": "conversation", "time": 111.0, "conversation": "r-0000", "record": {"reward": None}})
    recorded = [(span.name, span.start_time / 1e9, span.end_time / 1e9) for span in exporter.get_finished_spans()]
    assert recorded == [
        ("turn", 100, 102),
        ("turn", 102, 105),
        ("verdict", 105, 109),
        ("verdict", 105, 110),
        ("conversation", 100, 111),
    ]


def test_requests_that_never_end_are_forgotten(taken: ConversationSpans) -> None:
    for number in range(20):
        taken.take({"event": "batch", "time": 1.0, "request": f"r{number}"})
    assert len(taken._requests) == 8
    taken.take({"event": "turn", "time": 2.0, "conversation": "r0-0000", "turn": Turn})
    taken.take({"event": "weights", "time": 2.0, "policy": "run 1"})


def test_off_unless_an_endpoint_is_set_and_the_packages_are_there(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
    assert spans_of_environment() is None and not caplog.records
    monkeypatch.setenv(ENDPOINT_VARIABLE, "http://127.0.0.1:9")
    on = spans_of_environment()
    assert isinstance(on[0], ConversationSpans)
    on[1].shutdown()
    monkeypatch.setattr(spans.importlib.util, "find_spec", lambda name: None)
    assert spans_of_environment() is None and "pip install '.[opentelemetry]'" in caplog.text
