"""What a killed server or trainer leaves behind, and that its successor goes on from there."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.errors import EngineFailure, RequestConflict
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.trainer.checkpoints import UNFINISHED, complete_checkpoint, last_checkpoint
from tests.support.scripted_engine import ScriptedJudge
from tests.support.scripted_room import SCORES, Room, untimed

REQUEST = SampleRequest(
    problems=["fractions", "fractions", "sums"],
    answers=["1/2", "1/2", "7"],
    request_id="run-step000003",
    seed=1,
    step=3,
)


@pytest.fixture
def maths(generation: GenerationConfig, prompts) -> GenerationConfig:
    """Everything that a conversation can have: an opening attempt, two rules judged twice, solutions."""
    return replace(
        generation,
        forced_conversation_type="attempt",
        judges_rules_prompts_paths={"does_not_leak_answer": "scripted", "follows_pedagogical_values": "scripted"},
        number_judge_attempts=2,
    )


def sample(room: Room, generation: GenerationConfig, request: SampleRequest = REQUEST) -> SampleResponse:
    """A server's whole life: opened on what is in the folder, asked once."""
    return untimed(asyncio.run(room.open(generation).sample(request)))


def judge_that_accepts(rule: str, conversation: list, attempt: int) -> str:
    return json.dumps({"reasoning": f"{rule} {attempt}", "decision": "OK"} | SCORES)


def write_journal(room: Room, lines: list[bytes], rest: bytes = b"") -> None:
    room.folder.mkdir(parents=True, exist_ok=True)
    (room.folder / JOURNAL_NAME).write_bytes(b"".join(lines) + rest)


def what_happened(event: dict) -> str:
    return json.dumps({name: value for name, value in event.items() if name != "time"}, sort_keys=True)


@pytest.mark.parametrize("kind", ["generation", "maths"])
def test_whatever_line_a_kill_leaves_the_next_server_does_the_rest_and_nothing_twice(
    request: pytest.FixtureRequest, tokenizer, tmp_path: Path, kind: str
) -> None:
    """The journal is cut at every line, with half of the next one behind it; the answer is always the same, and no
    turn, verdict, solution or record is there twice."""
    generation = request.getfixturevalue(kind)
    whole_room = Room(tokenizer, tmp_path / "whole")
    whole_room.judge = ScriptedJudge(judge_that_accepts)
    expected = sample(whole_room, generation)
    assert all(record.reward is not None for record in expected.conversations)
    lines = (whole_room.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    event_counts = Counter(what_happened(json.loads(line)) for line in lines[1:])
    for count in range(len(lines) + 1):
        room = Room(tokenizer, tmp_path / f"cut{count}")
        room.judge = ScriptedJudge(judge_that_accepts)
        write_journal(room, lines[:count], lines[count][: len(lines[count]) // 2] if count < len(lines) else b"")
        assert sample(room, generation) == expected, f"cut after {count} lines"
        events = [event for event in read_journal(room.folder / JOURNAL_NAME) if event["event"] != "batch"]
        assert Counter(map(what_happened, events)) == event_counts, f"cut after {count} lines"


def test_record_and_rewards_of_an_earlier_server(room: Room, generation: GenerationConfig) -> None:
    first = sample(room, generation).conversations[0]
    service = room.open(generation)
    assert service.record(first.id) == first
    conversation = service.record(first.id).conversation(service.environment.rules)
    assert conversation.judgement.scores.final_reward == first.reward


@pytest.mark.parametrize("change", ["weights", "configuration", "body"])
def test_a_batch_under_other_circumstances_is_played_anew(room: Room, generation, change: str) -> None:
    before = sample(room, generation)
    request = REQUEST
    if change == "weights":
        room.teacher.weights = "others"
        room.teacher._script = lambda _: "Say goodbye."
    elif change == "configuration":
        generation = replace(generation, max_turns=3)
    else:
        request = REQUEST.model_copy(update={"seed": 2})
    calls = len(room.teacher.calls)
    after = sample(room, generation, request)
    assert len(room.teacher.calls) - calls == sum(len(record.turns) // 2 + 1 for record in after.conversations)
    if change != "body":
        assert [record.turns for record in after.conversations] != [record.turns for record in before.conversations]
    calls = len(room.teacher.calls)
    assert sample(room, generation, request) == after and len(room.teacher.calls) == calls
    assert [room.open(generation).record(record.id) for record in after.conversations] == after.conversations


def test_timeouts_and_ports_are_no_other_circumstances(room: Room, generation: GenerationConfig) -> None:
    before, calls = sample(room, generation), len(room.teacher.calls)
    assert sample(room, replace(generation, server_port=9, sample_timeout_s=5.0)) == before
    assert len(room.teacher.calls) == calls


@pytest.mark.parametrize("restarted", [True, False])
def test_failed_judge_attempts_are_made_again_only_when_asked(room: Room, generation, restarted: bool) -> None:
    calls: list[int] = []
    down = True

    def judge(rule: str, conversation: list, attempt: int) -> str:
        calls.append(attempt)
        if down and attempt == 1:
            raise TimeoutError("the judge is down")
        return json.dumps(SCORES)

    async def scenario() -> None:
        nonlocal down
        service = room.open(generation)
        failed = await service.sample(request)
        assert [record.reward for record in failed.conversations] == [None, None, None]
        down = False
        if restarted:
            service = room.open(generation)
        assert (await service.sample(request)).conversations[0].reward is None and len(calls) == 3
        mended = await service.sample(again)
        assert all(record.reward is not None for record in mended.conversations) and len(calls) == 6
        assert await service.sample(again) == mended and len(calls) == 6
        assert service.record(mended.conversations[0].id) == mended.conversations[0]

    request, again = REQUEST, REQUEST.model_copy(update={"judge_again": True})
    room.judge = ScriptedJudge(lambda rule, conversation, _: judge(rule, conversation, 1))
    asyncio.run(scenario())


def test_an_engine_that_dies_under_the_judge_is_no_failed_judgement(room: Room, generation: GenerationConfig) -> None:
    def die(*_: object) -> str:
        raise EngineFailure("the judge's engine died")

    room.judge = ScriptedJudge(die)
    with pytest.raises(EngineFailure):
        sample(room, generation)
    assert not [event for event in read_journal(room.folder / JOURNAL_NAME) if event["event"] == "verdict"]
    room.judge = ScriptedJudge(judge_that_accepts)
    calls = len(room.teacher.calls)
    assert all(record.reward is not None for record in sample(room, generation).conversations)
    assert len(room.teacher.calls) == calls


def test_a_running_request_refuses_another_body_under_its_id(room: Room, generation: GenerationConfig) -> None:
    async def scenario() -> None:
        service = room.open(generation)
        await service.sample(REQUEST)
        with pytest.raises(RequestConflict):
            await service.sample(REQUEST.model_copy(update={"seed": 9}))

    asyncio.run(scenario())


# Checkpoints -------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, step: int) -> None:
    target = folder / UNFINISHED / f"checkpoint-{step}"
    target.mkdir(parents=True)
    (target / "trainer_state.json").write_text(str(step))


def test_checkpoint_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    write_checkpoint(tmp_path, 10)
    assert last_checkpoint(tmp_path) is None
    complete_checkpoint(tmp_path, 10, keep=2)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_old_checkpoints_go_after_the_new_one_is_complete(tmp_path: Path) -> None:
    for step in (5, 10):
        write_checkpoint(tmp_path, step)
        complete_checkpoint(tmp_path, step, keep=2)
    write_checkpoint(tmp_path, 15)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-5"]
    complete_checkpoint(tmp_path, 15, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-15"]
