"""A batch that still waits for its judge while newer weights play the next one: no conversation is of two policies, and
nothing is played or paid for twice, also if the server ends meanwhile."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from classroom_rl.errors import PolicyMismatch, ProviderFailure
from classroom_rl.models.policy_folder import policy_path, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.server.sampling_service import SamplingService
from tests.server.test_app import Halting, HaltingJudge, HaltingStudent
from tests.support.scripted_engine import ScriptedJudge
from tests.support.scripted_room import SCORES, Room
from tests.support.turned_clock import run

TURNS = 5
OWN_TURNS = 3


def batch(step: int, version: int) -> SampleRequest:
    """Two conversations of a step, played with a version of the policy."""
    body = {"problems": ["fractions"] * 2, "answers": ["1/2"] * 2, "seed": 1, "step": step}
    return SampleRequest(request_id=f"run-step{step:06d}-of{version}", run_id="run", policy_version=version, **body)


BATCH, NEXT = batch(2, 1), batch(3, 2)


async def load(room: Room, service: SamplingService, version: int, content: float | None = None) -> None:
    policy = PolicyVersion("run", version)
    weights = {"w": numpy.full(4, version if content is None else content, numpy.float32)}
    folder = policy_path(room.folder, version)
    write_policy(folder, policy, lambda target: save_file(weights, target / "model.safetensors"))
    await service.load_policy(folder, policy, 5.0)


def versions(response: SampleResponse) -> set[int]:
    return {turn.policy.version for record in response.conversations for turn in record.turns if turn.policy}


def events(folder: Path) -> list[dict]:
    return list(read_journal(folder / JOURNAL_NAME))


def of(found: list[dict], event: str, request: SampleRequest) -> list[int]:
    """The places of a request's events of one kind."""
    return [
        index
        for index, entry in enumerate(found)
        if entry["event"] == event and entry["conversation"].startswith(request.request_id)
    ]


async def begin(room: Room, generation, halt: Halting) -> tuple[SamplingService, asyncio.Task[SampleResponse]]:
    """A server on which the batch is played and waits for its judge, and the next version is loaded."""
    room.judge = HaltingJudge(halt)
    service = room.open(generation)
    await load(room, service, 1)
    waiting = asyncio.create_task(service.sample(BATCH))
    await service.play_as_json(BATCH)
    assert not waiting.done()
    await load(room, service, 2)
    return service, waiting


async def test_the_next_batch_is_played_by_newer_weights_while_the_judge_reads(room: Room, generation) -> None:
    halt = Halting()
    service, waiting = await begin(room, generation, halt)
    await service.play_as_json(NEXT)
    repeated = asyncio.create_task(service.sample(BATCH))  # a client repeats its request while it waits
    await asyncio.sleep(0.05)
    halt.go.set()
    first, second = await waiting, await service.sample(NEXT)
    assert await repeated == first and service.running == []
    assert (versions(first), versions(second)) == ({1}, {2})
    assert len(room.teacher.calls) == 4 * OWN_TURNS
    journal = events(room.folder)
    new_weights = max(index for index, event in enumerate(journal) if event["event"] == "weights")
    assert (
        max(of(journal, "turn", BATCH))
        < new_weights
        < min(of(journal, "turn", NEXT))
        < max(of(journal, "verdict", BATCH))
    )


class SlowJudge(ScriptedJudge):
    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        await asyncio.sleep(7.0)
        return await super().judge(rule, conversation, problem, attempt)


async def test_the_answer_says_for_how_long_the_judge_alone_was_waited_for(room: Room, generation) -> None:
    room.judge = SlowJudge(lambda rule, conversation, attempt: json.dumps(SCORES))
    service = room.open(generation)
    await load(room, service, 1)
    response = await service.sample(BATCH)
    assert response.seconds_after_policy == pytest.approx(7.0)


async def test_played_is_answered_after_the_last_message_and_not_before(room: Room, generation) -> None:
    halt = Halting()
    room.student = HaltingStudent(room.tokenizer, halt)
    service = room.open(generation)
    await load(room, service, 1)
    played = asyncio.create_task(service.play_as_json(BATCH))
    await halt.reached.wait()
    await asyncio.sleep(0.2)  # the other conversation is over
    assert not played.done()
    halt.go.set()
    assert json.loads(await played) == {"request_id": BATCH.request_id}
    assert len(of(events(room.folder), "turn", BATCH)) == 2 * TURNS


def test_both_batches_go_on_after_a_server_ended_between_them(room: Room, generation) -> None:
    async def until_the_end() -> None:
        halt, talk = Halting(), Halting()
        service, waiting = await begin(room, generation, halt)
        room.student._halt = talk
        following = asyncio.create_task(service.sample(NEXT))
        await talk.reached.wait()
        for task in (waiting, following, *(open_batch.task for open_batch in service._batches.values())):
            task.cancel()
        await asyncio.sleep(0)
        service.journal.close()

    async def afterwards() -> tuple[SampleResponse, SampleResponse]:
        room.judge = ScriptedJudge(lambda *_: json.dumps(SCORES))
        service = room.open(generation)
        await service.restore_policy(room.folder, 5.0)
        assert room.teacher.policy == PolicyVersion("run", 2)
        return await service.sample(NEXT), await service.sample(BATCH)

    room.student = HaltingStudent(room.tokenizer, _at_once)
    run(until_the_end())
    room.student._halt = _at_once
    second, first = run(afterwards())
    assert (versions(first), versions(second)) == ({1}, {2})
    assert all(record.reward is not None for record in first.conversations + second.conversations)
    journal = events(room.folder)
    assert [len(of(journal, "turn", request)) for request in (BATCH, NEXT)] == [2 * TURNS, 2 * TURNS]
    assert [len(of(journal, "verdict", request)) for request in (BATCH, NEXT)] == [2, 2]


async def _at_once() -> None:
    return


async def test_a_run_folder_that_was_copied_has_the_weights_that_it_holds(room: Room, generation) -> None:
    """The journal of a backup names the folder where the run was; the server must not start with untrained weights."""
    loaded = []
    service = room.open(generation)
    await load(room, service, 3)
    service.journal.close()
    restored = room.folder.with_name("restored")
    shutil.copytree(room.folder, restored)
    room.folder, load_policy = restored, room.teacher.load_policy

    async def recorded(folder: Path, policy: PolicyVersion, timeout_s: float) -> None:
        loaded.append((folder, policy))
        await load_policy(folder, policy, timeout_s)

    room.teacher.load_policy = recorded
    await room.open(generation).restore_policy(room.folder, 5.0)
    assert loaded == [(policy_path(restored, 3).resolve(), PolicyVersion("run", 3))]


async def test_a_further_server_restores_the_policy_of_the_run(room: Room, generation) -> None:
    """Its journal is in a folder of its own inside the run folder, where the policies are."""
    run_folder = room.folder
    room.folder = run_folder / "server1"
    service = room.open(generation)
    policy = PolicyVersion("run", 3)
    folder = policy_path(run_folder, 3)
    write_policy(folder, policy, lambda target: save_file({"w": numpy.ones(4)}, target / "model.safetensors"))
    await service.load_policy(folder, policy, 5.0)
    service.journal.close()
    room.teacher.policy = PolicyVersion()
    await room.open(generation).restore_policy(run_folder, 5.0)
    assert room.teacher.policy == policy


async def test_a_batch_with_messages_missing_is_not_finished_by_other_weights(room: Room, generation) -> None:
    halt = Halting()
    room.student = HaltingStudent(room.tokenizer, halt)
    service = room.open(generation)
    await load(room, service, 1)
    waiting = asyncio.create_task(service.sample(BATCH))
    await halt.reached.wait()
    await load(room, service, 2)
    halt.go.set()
    for awaitable in (waiting, service.sample(BATCH), service.play_as_json(BATCH)):
        with pytest.raises(PolicyMismatch, match="asks for policy run v1, but run v2 is loaded"):
            await awaitable


@pytest.mark.parametrize("loaded", [((3, None),), ((1, 9.0), (2, None))], ids=["two versions later", "other weights"])
async def test_only_the_weights_before_the_present_ones_count(room: Room, generation, loaded) -> None:
    """A resumed trainer may publish other weights under the version that the batch asks for."""
    halt = Halting()
    halt.go.set()
    service, waiting = await begin(room, generation, halt)
    await waiting
    for version, content in loaded:
        await load(room, service, version, content)
    with pytest.raises(PolicyMismatch, match="asks for policy run v1"):
        await service.sample(BATCH)


async def test_weights_that_are_loaded_twice_leave_those_before_them(room: Room, generation) -> None:
    halt = Halting()
    service, waiting = await begin(room, generation, halt)
    await load(room, service, 2)
    repeated = asyncio.create_task(service.sample(BATCH))
    halt.go.set()
    assert await repeated == await waiting


async def test_a_judge_that_fails_stops_its_batch_and_the_next_one_is_kept(room: Room, generation) -> None:
    halt = Halting()

    class Refusing(HaltingJudge):
        async def judge(self, *arguments, **named) -> str:
            await self._halt()
            raise ProviderFailure("The judge refuses every request.")

    service, waiting = await begin(room, generation, halt)
    room.judge._halt = halt
    service.environment.roles.judge.judge = Refusing(halt).judge
    await service.play_as_json(NEXT)
    halt.go.set()
    with pytest.raises(ProviderFailure):
        await service.sample(NEXT)
    await asyncio.gather(waiting, return_exceptions=True)
    service.journal.close()
    room.judge = ScriptedJudge(lambda *_: json.dumps(SCORES))
    call_count = len(room.teacher.calls)
    resumed = room.open(generation)
    await load(room, resumed, 2)  # the resumed trainer's first weights
    assert versions(await resumed.sample(NEXT)) == {2} and len(room.teacher.calls) == call_count
