"""Supervised conversations after a kill: no draft is sampled again, no review is asked again, and the record is the
same."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import EngineFailure, RequestRefused
from classroom_rl.results.rollout_files import read_records, write_records
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.rollout.supervision import OBSERVE, REPLACE, RETRY
from tests.support.scripted_room import Room
from tests.support.supervised_room import (
    LEAK,
    VALID,
    DrawnTeacher,
    ScriptedSupervisor,
    TextTeacher,
    finds_leaks,
    rows_by_kind,
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
MODES = {
    "observe": {"on_invalid": OBSERVE},
    "retry": {"on_invalid": RETRY, "max_retries": 2},
    "retry with the critique": {"on_invalid": RETRY, "max_retries": 2, "show_critique": True},
    "replace": {"on_invalid": REPLACE},
}


def request(**changes) -> SampleRequest:
    body = {"problems": ["fractions"], "answers": ["1/2"], "request_id": "r", "seed": 1, "step": 0, "supervised": True}
    return SampleRequest(**(body | changes))


def opened(tokenizer, folder: Path, text: bool = False) -> Room:
    room = Room(tokenizer, folder)
    room.teacher = TextTeacher(LINES) if text else DrawnTeacher(tokenizer, LINES)
    room.supervisor, room.turn_rewards = ScriptedSupervisor(), ("supervisor", "length")
    return room


def sample(room: Room, generation: GenerationConfig, **changes) -> tuple[ConversationRecord, ConversationRecord]:
    """A server's whole life: the record that it answers with, and the one that it finds in its journal."""

    async def life() -> tuple[ConversationRecord, ConversationRecord]:
        service = room.open(generation)
        (record,) = (await service.sample(request(**changes))).conversations
        return record, service.record(record.id)

    return asyncio.run(life())


@pytest.mark.parametrize("text", [False, True], ids=["tokens", "text"])
@pytest.mark.parametrize("mode", MODES)
def test_wherever_a_kill_comes_the_next_server_goes_on(
    tokenizer, tmp_path: Path, generation: GenerationConfig, mode: str, text: bool
) -> None:
    """The journal is cut at every line, with half of the next one behind it."""
    rules = supervising(generation, **MODES[mode])
    whole = opened(tokenizer, tmp_path / "whole", text)
    wanted, stored = sample(whole, rules)
    assert stored == wanted and wanted.state == "END" and (text or wanted.branches)
    lines = (whole.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    events = [json.loads(line) for line in lines]
    happened = Counter(map(what_happened, events[1:]))
    for count in range(1, len(lines) + 1):
        room = opened(tokenizer, tmp_path / f"cut{count}", text)
        write_journal(room, lines[:count], lines[count][: len(lines[count]) // 2] if count < len(lines) else b"")
        found = sample(room, rules)
        for name in ConversationRecord.model_fields:
            assert [getattr(each, name) for each in found] == [getattr(wanted, name)] * 2, f"{name}, cut after {count}"
        kinds = Counter(event["event"] for event in events[:count])
        reviewed = kinds["review"] + sum(event.get("turn", {}).get("review") is not None for event in events[:count])
        assert len(room.teacher.calls) == len(whole.teacher.calls) - kinds["draft"]
        assert len(room.supervisor.asked) == len(whole.supervisor.asked) - reviewed
        after = [event for event in read_journal(room.folder / JOURNAL_NAME) if event["event"] != "batch"]
        assert Counter(map(what_happened, after)) == happened, f"cut after {count} lines"


def test_a_supervised_record_survives_its_file(tokenizer, tmp_path: Path, generation: GenerationConfig) -> None:
    record, _ = sample(opened(tokenizer, tmp_path), supervising(generation, **MODES["retry with the critique"]))
    write_records(tmp_path / "written.parquet", [record])
    (read,) = read_records(tmp_path / "written.parquet")
    assert read.model_dump(exclude={"logprobs"}) == record.model_dump(exclude={"logprobs"})
    assert rows_by_kind(read) == rows_by_kind(record)


def test_another_supervision_plays_the_batch_anew(tokenizer, tmp_path: Path, generation: GenerationConfig) -> None:
    room = opened(tokenizer, tmp_path)
    first, _ = sample(room, supervising(generation, on_invalid=REPLACE))
    asked = len(room.supervisor.asked)
    again, stored = sample(room, supervising(generation, on_invalid=OBSERVE))
    assert len(room.supervisor.asked) > asked and again == stored != first


def test_a_draft_of_other_weights_is_not_kept(tokenizer, tmp_path: Path, generation: GenerationConfig) -> None:
    rules = supervising(generation, **MODES["retry"])
    whole = opened(tokenizer, tmp_path / "whole")
    sample(whole, rules)
    lines = (whole.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    room = opened(tokenizer, tmp_path / "cut")
    write_journal(room, lines[:3])  # the batch, the first draft, its review
    room.teacher.weights = "others"
    sample(room, rules)
    assert len(room.teacher.calls) == len(whole.teacher.calls)


# Failures in the middle ---------------------------------------------------------------------------------------------


def test_a_supervisor_that_stops_the_run_is_no_failed_review(tokenizer, tmp_path: Path, generation) -> None:
    def dies(about):
        if len(room.supervisor.asked) == 2:
            raise EngineFailure("the supervisor's engine died")
        return finds_leaks(about)

    rules = supervising(generation, **MODES["retry"])
    wanted, _ = sample(opened(tokenizer, tmp_path / "whole"), rules)
    room = opened(tokenizer, tmp_path / "run")
    room.supervisor = ScriptedSupervisor(dies)
    with pytest.raises(EngineFailure, match="supervisor's engine"):
        sample(room, rules)
    said = len(room.teacher.calls)
    assert [event["event"] for event in read_journal(room.folder / JOURNAL_NAME)] == [
        "batch",
        "draft",
        "review",
        "draft",
    ]
    room.supervisor = ScriptedSupervisor()
    assert sample(room, rules) == (wanted, wanted) and room.teacher.calls[said][1].draw[1] == 2


def test_a_teacher_that_is_refused_at_its_second_draft(tokenizer, tmp_path: Path, generation) -> None:
    """The conversation fails, also in the next server, until its request asks to try again; then it goes on."""
    rules = supervising(generation, **MODES["retry"])
    wanted, _ = sample(opened(tokenizer, tmp_path / "whole", text=True), rules)
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
    assert sample(room, rules, judge_again=True) == (wanted, wanted)
    lines = (room.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    for count in range(6, len(lines)):
        other = opened(tokenizer, tmp_path / f"cut{count}", text=True)
        write_journal(other, lines[:count])
        found = sample(other, rules, judge_again=True)
        assert found == (wanted, wanted), f"cut after {count} lines"


@pytest.mark.parametrize("refused", [VALID, LEAK])
def test_a_review_alone_after_a_failure_goes_on(tokenizer, tmp_path: Path, generation, refused) -> None:
    """A failure that was tried again is over as soon as anything follows it, whatever that is."""
    rules = supervising(generation, **MODES["retry"])
    room = opened(tokenizer, tmp_path / "run")
    room.supervisor = ScriptedSupervisor(lambda about: refused)
    wanted, _ = sample(room, rules)
    lines = (room.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    failure = {
        "event": "failure",
        "time": 1.0,
        "conversation": "r-0000",
        "reason": "x",
        "prompt_ids": [],
        "end_ids": [],
    }
    other = opened(tokenizer, tmp_path / "other")
    other.supervisor = ScriptedSupervisor(lambda about: refused)
    write_journal(other, [*lines[:2], json.dumps(failure).encode() + b"\n", *lines[2:3]])
    assert sample(other, rules) == (wanted, wanted)


def test_a_failure_before_the_first_message_leaves_tokens(tokenizer, tmp_path: Path, generation) -> None:
    """Trainers need tokens of every conversation, also of one whose context was open and empty."""

    class Refused(DrawnTeacher):
        async def generate(self, prompt_ids, sampling):
            if sampling.draw[1] == 1:
                raise RequestRefused("no")
            return await super().generate(prompt_ids, sampling)

    room = opened(tokenizer, tmp_path)
    room.teacher = Refused(tokenizer, LINES)
    record, stored = sample(room, supervising(generation, **MODES["retry"]))
    assert record == stored and record.failure == "no" and record.turns == []
    assert len(record.completion_ids) == 1 and record.mask == [0] and record.prompt_ids
