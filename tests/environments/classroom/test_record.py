"""Conversations after a kill: nothing is sampled, reviewed or asked again, and the record is the same, also in its
file."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import EngineFailure, RequestRefused
from classroom_rl.results.rollout_files import read_records, write_records
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.rollout.supervision import OBSERVE, REPLACE, RETRY
from tests.environments.classroom.conftest import CALLING_LINES
from tests.environments.classroom.test_environment import FullStudent
from tests.environments.classroom.test_post_test_turn import PROBLEM, SAID, asking, in_lesson
from tests.support.scripted_room import Room
from tests.support.supervised_room import (
    LEAK,
    VALID,
    DrawnTeacher,
    ScriptedSupervisor,
    TextTeacher,
    finds_leaks,
    supervising,
)
from tests.trainer.test_resume import what_happened, write_journal

LINES = (
    "It is wrong.",
    "<think>hm</think>Still wrong.",
    "Say hello.",
    "So?",
    "wrong again",
    "Go on.",
    "What is wrong?",
)
RETRIES = {"on_invalid": RETRY, "max_retries": 2}
WITH_CRITIQUE = RETRIES | {"show_critique": True}
Scenario = Callable[[Room, pytest.FixtureRequest], GenerationConfig]
"""Scripts a room, and returns the rules to play by."""


def plain(fixture: str, text: bool = False) -> Scenario:
    """A teacher that is not supervised, under the rules of a fixture."""

    def prepare(room: Room, request: pytest.FixtureRequest) -> GenerationConfig:
        lines = CALLING_LINES if fixture == "tooled" else LINES
        room.teacher = TextTeacher(lines) if text else DrawnTeacher(room.tokenizer, lines)
        return request.getfixturevalue(fixture)

    return prepare


def supervised(fixture: str = "generation", text: bool = False, **changes) -> Scenario:
    def prepare(room: Room, request: pytest.FixtureRequest) -> GenerationConfig:
        rules = plain(fixture, text)(room, request)
        room.supervisor, room.turn_rewards = ScriptedSupervisor(), ("supervisor", "length")
        return supervising(rules, **changes)

    return prepare


def full_student(room: Room, request: pytest.FixtureRequest) -> GenerationConfig:
    room.student = FullStudent(room.tokenizer, lambda prompt: prompt.count("Hello.") > 0)
    return request.getfixturevalue("generation")


def post_test(room: Room, request: pytest.FixtureRequest) -> GenerationConfig:
    in_lesson(room, SAID)
    room.reward_weights = {"post_test": 1.0}
    return asking(request.getfixturevalue("generation"), ask_student=True)


SCENARIOS = {
    "observe": supervised(on_invalid=OBSERVE),
    "observe, text": supervised(on_invalid=OBSERVE, text=True),
    "retry": supervised(**RETRIES),
    "retry, text": supervised(**RETRIES, text=True),
    "retry with the critique": supervised(**WITH_CRITIQUE),
    "retry with the critique, text": supervised(**WITH_CRITIQUE, text=True),
    "replace": supervised(on_invalid=REPLACE),
    "replace, text": supervised(on_invalid=REPLACE, text=True),
    "tools": plain("tooled"),
    "tools, text": plain("tooled", text=True),
    "tools, retry with the critique": supervised("tooled", **WITH_CRITIQUE),
    "tools, retry with the critique, text": supervised("tooled", **WITH_CRITIQUE, text=True),
    "tools, replace": supervised("tooled", on_invalid=REPLACE),
    "a template opens": plain("socratic"),
    "the student's context is full": full_student,
    "post-test": post_test,
}


def opened(tokenizer, folder: Path, text: bool = False) -> Room:
    """A room with a supervisor, whose teacher is wrong at times."""
    room = Room(tokenizer, folder)
    room.teacher = TextTeacher(LINES) if text else DrawnTeacher(tokenizer, LINES)
    room.supervisor = ScriptedSupervisor()
    return room


def sample(room: Room, generation: GenerationConfig, **changes) -> tuple[ConversationRecord, ConversationRecord]:
    """A server's whole life: the record that it answers with, and the one that it finds in its journal."""
    room.teacher_context = generation.max_tokens_in_conversation
    body = {"problems": ["fractions"], "answers": ["1/2"], "request_id": "r", "seed": 1, "step": 0, "supervised": True}
    if generation.post_test.enable:
        body |= {"problems": [PROBLEM], "answers": [""]}

    async def life() -> tuple[ConversationRecord, ConversationRecord]:
        service = room.open(generation)
        (record,) = (await service.sample(SampleRequest(**(body | changes)))).conversations
        return record, service.record(record.id)

    return asyncio.run(life())


def lines_of(room: Room) -> list[bytes]:
    return (room.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)


def untimed(value):
    """A record or an event without the seconds that calls took."""
    if isinstance(value, ConversationRecord):
        value = value.model_dump()
    if isinstance(value, dict):
        return {name: untimed(item) for name, item in value.items() if name != "seconds"}
    return [untimed(item) for item in value] if isinstance(value, list | tuple) else value


def asked_for(events: list[dict]) -> Counter[str]:
    """How often each model was asked for what the events hold."""
    kinds = {event["event"] for event in events}
    counts = Counter()
    for event in events:
        kind, message = event["event"], event.get("turn") or event.get("draft", {}).get("turn", {})
        if message.get("role") == "student":
            counts["student"] += 1
        elif message and kind == ("draft" if "draft" in kinds else "turn"):
            counts["teacher"] += 1 + len({call["segment"] for call in message.get("tool_calls", ())})
        if kind == "review" or kind == "turn" and message.get("review") is not None:
            counts["supervisor"] += 1
        if kind == "post_test":
            counts["student"] += sum(answer["student"] == "student" for answer in event["post_test"]["answers"])
    return counts


@pytest.mark.parametrize("name", SCENARIOS)
def test_wherever_a_kill_comes_the_next_server_goes_on(
    request: pytest.FixtureRequest, tokenizer, tmp_path: Path, name: str
) -> None:
    """The journal is cut at every line, with half of the next one behind it."""
    uncut = Room(tokenizer, tmp_path / "whole")
    rules = SCENARIOS[name](uncut, request)
    expected = [untimed(record) for record in sample(uncut, rules)]
    assert expected[0] == expected[1] and expected[0]["state"] == "END"
    lines = lines_of(uncut)
    events = [json.loads(line) for line in lines]
    event_counts = Counter(what_happened(untimed(event)) for event in events[1:])
    assert asked_for(events)["teacher"] == len(uncut.teacher.calls)
    for count in range(1, len(lines) + 1):
        room = Room(tokenizer, tmp_path / f"cut{count}")
        rules = SCENARIOS[name](room, request)
        write_journal(room, lines[:count], lines[count][: len(lines[count]) // 2] if count < len(lines) else b"")
        assert [untimed(record) for record in sample(room, rules)] == expected, f"cut after {count} lines"
        journaled = asked_for(events[:count])
        assert len(room.teacher.calls) == len(uncut.teacher.calls) - journaled["teacher"], f"cut after {count} lines"
        assert len(room.student.calls) == len(uncut.student.calls) - journaled["student"], f"cut after {count} lines"
        if room.supervisor is not None:
            assert len(room.supervisor.asked) == len(uncut.supervisor.asked) - journaled["supervisor"]
        journal = [event for event in read_journal(room.folder / JOURNAL_NAME) if event["event"] != "batch"]
        assert Counter(what_happened(untimed(event)) for event in journal) == event_counts, f"cut after {count} lines"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_record_survives_its_file(request: pytest.FixtureRequest, room: Room, name: str) -> None:
    record, _ = sample(room, SCENARIOS[name](room, request))
    write_records(room.folder / "written.parquet", [record])
    (restored,) = read_records(room.folder / "written.parquet")
    assert restored.model_dump(exclude={"logprobs"}) == record.model_dump(exclude={"logprobs"})
    assert [(row.kind, row.mask, row.messages) for row in rows_of(restored)] == [
        (row.kind, row.mask, row.messages) for row in rows_of(record)
    ]


def test_another_supervision_plays_the_batch_anew(tokenizer, tmp_path: Path, generation: GenerationConfig) -> None:
    room = opened(tokenizer, tmp_path)
    first, _ = sample(room, supervising(generation, on_invalid=REPLACE))
    reviews = len(room.supervisor.asked)
    again, stored = sample(room, supervising(generation, on_invalid=OBSERVE))
    assert len(room.supervisor.asked) > reviews and again == stored != first


def test_a_draft_of_other_weights_is_not_kept(tokenizer, tmp_path: Path, generation: GenerationConfig) -> None:
    rules = supervising(generation, **RETRIES)
    uncut, room = opened(tokenizer, tmp_path / "whole"), opened(tokenizer, tmp_path / "cut")
    sample(uncut, rules)
    write_journal(room, lines_of(uncut)[:3])  # the batch, the first draft, its review
    room.teacher.weights = "others"
    sample(room, rules)
    assert len(room.teacher.calls) == len(uncut.teacher.calls)


# Failures in the middle ---------------------------------------------------------------------------------------------


def test_a_supervisor_that_stops_the_run_is_no_failed_review(tokenizer, tmp_path: Path, generation) -> None:
    def dies(about):
        if len(room.supervisor.asked) == 2:
            raise EngineFailure("the supervisor's engine died")
        return finds_leaks(about)

    rules = supervising(generation, **RETRIES)
    expected, _ = sample(opened(tokenizer, tmp_path / "whole"), rules)
    room = opened(tokenizer, tmp_path / "run")
    room.supervisor = ScriptedSupervisor(dies)
    with pytest.raises(EngineFailure, match="supervisor's engine"):
        sample(room, rules)
    calls = len(room.teacher.calls)
    events = [event["event"] for event in read_journal(room.folder / JOURNAL_NAME)]
    assert events == ["batch", "draft", "review", "draft"]
    room.supervisor = ScriptedSupervisor()
    assert sample(room, rules) == (expected, expected) and room.teacher.calls[calls][1].draw[1] == 2


def test_a_teacher_that_is_refused_at_its_second_draft(tokenizer, tmp_path: Path, generation) -> None:
    """The conversation fails, also in the next server, until its request asks to try again; then it goes on."""
    rules = supervising(generation, **RETRIES)
    expected, _ = sample(opened(tokenizer, tmp_path / "whole", text=True), rules)
    room = opened(tokenizer, tmp_path / "run", text=True)
    chat = room.teacher.chat

    async def refused(messages, sampling):
        if len(room.teacher.calls) == 1 and not mended:
            raise RequestRefused("400: flagged")
        return await chat(messages, sampling)

    mended: list[bool] = []
    room.teacher.chat = refused
    failed, stored = sample(room, rules)
    assert failed == stored and failed.reward is None and "flagged" in failed.failure and failed.turns == []
    mended.append(True)
    assert sample(room, rules) == (failed, failed)
    assert sample(room, rules, judge_again=True) == (expected, expected)
    lines = lines_of(room)
    for count in range(6, len(lines)):
        other = opened(tokenizer, tmp_path / f"cut{count}", text=True)
        write_journal(other, lines[:count])
        assert sample(other, rules, judge_again=True) == (expected, expected), f"cut after {count} lines"


@pytest.mark.parametrize("review", [VALID, LEAK])
def test_a_review_alone_after_a_failure_goes_on(tokenizer, tmp_path: Path, generation, review) -> None:
    """A failure that was tried again is over as soon as anything follows it, whatever that is."""
    rules = supervising(generation, **RETRIES)
    room, other = opened(tokenizer, tmp_path / "run"), opened(tokenizer, tmp_path / "other")
    room.supervisor = other.supervisor = ScriptedSupervisor(lambda _: review)
    expected, _ = sample(room, rules)
    failure = {"event": "failure", "time": 1.0, "conversation": "r-0000", "reason": "x"}
    failure |= {"prompt_ids": [], "end_ids": []}
    lines = lines_of(room)
    write_journal(other, [*lines[:2], json.dumps(failure).encode() + b"\n", *lines[2:3]])
    assert sample(other, rules) == (expected, expected)


def test_a_failure_before_the_first_message_leaves_tokens(tokenizer, tmp_path: Path, generation) -> None:
    """Trainers need tokens of every conversation, also of one whose context was open and empty."""

    class Refused(DrawnTeacher):
        async def generate(self, prompt_ids, sampling):
            if sampling.draw[1] == 1:
                raise RequestRefused("no")
            return await super().generate(prompt_ids, sampling)

    room = opened(tokenizer, tmp_path)
    room.teacher = Refused(tokenizer, LINES)
    record, stored = sample(room, supervising(generation, **RETRIES))
    assert record == stored and record.failure == "no" and record.turns == []
    assert len(record.completion_ids) == 1 and record.mask == [0] and record.prompt_ids
