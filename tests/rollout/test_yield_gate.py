"""The gate lets everybody through, in order, and few in each pass of the event loop."""

import asyncio
import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.environments.classroom.teacher import TeacherTools
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.scheduler import YieldGate
from tests.support.scripted_engine import ScriptedEngine
from tests.support.turned_clock import run


async def go_through(count: int, per_pass: int, rounds: int, cancelled: set[int]) -> list[tuple[int, int]]:
    """Each of `count` coroutines goes through the gate `rounds` times. Returns (coroutine, pass) in order."""
    gate, loop, now, seen = YieldGate(per_pass), asyncio.get_running_loop(), 0, []

    def count_passes() -> None:
        nonlocal now
        now += 1
        loop.call_soon(count_passes)

    async def walk(name: int) -> None:
        for _ in range(rounds):
            await gate.go_through()
            seen.append((name, now))

    loop.call_soon(count_passes)
    tasks = [asyncio.create_task(walk(name)) for name in range(count)]
    await asyncio.sleep(0)
    for name in cancelled & set(range(count)):
        tasks[name].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    return seen


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4), st.sets(st.integers(0, 59), max_size=20))
def test_everybody_goes_through_and_few_at_a_time(count, per_pass, rounds, cancelled):
    seen = run(go_through(count, per_pass, rounds, cancelled))
    times = Counter(name for name, _ in seen)
    assert all(times[name] == rounds for name in range(count) if name not in cancelled)
    assert all(many <= 2 * per_pass for many in Counter(now for _, now in seen).values())


@given(st.integers(1, 60), st.integers(1, 9))
def test_who_comes_first_goes_first(count, per_pass):
    seen = run(go_through(count, per_pass, 1, set()))
    assert [name for name, _ in seen] == list(range(count))
    assert seen[-1][1] - seen[0][1] >= (count - 1) // per_pass - 1


def test_it_works_again_after_a_rest():
    async def twice() -> int:
        gate = YieldGate(2)
        for _ in range(2):
            await asyncio.gather(*(gate.go_through() for _ in range(7)))
            await asyncio.sleep(0.01)
        return len(gate._waiting)

    assert run(twice()) == 0


def test_the_prompt_of_a_group_is_encoded_once(room, generation, monkeypatch):
    encoded, encode_chat = [], TeacherTools.encode_chat
    monkeypatch.setattr(TeacherTools, "encode_chat", lambda *given: encoded.append(1) or encode_chat(*given))
    service = room.open(generation)
    request = SampleRequest(problems=["a"] * 8 + ["b"] * 8, answers=[""] * 16, request_id="r", seed=1, step=0)
    records = run(service.sample(request)).conversations
    assert len(encoded) == 2
    assert len({tuple(record.prompt_ids) for record in records}) == 2


def test_a_batch_lets_others_go_on_between_its_conversations(room, generation):
    """An answer to a request that comes meanwhile waits for a few conversations, and not for all of them."""
    said, between = 0, []

    def say(_: str) -> str:
        nonlocal said
        said += 1
        return "Say hello."

    async def play() -> None:
        nonlocal said
        room.teacher = ScriptedEngine(room.tokenizer, say)
        request = SampleRequest(problems=["a"] * 300, answers=[""] * 300, request_id="r", seed=1, step=0)
        service = room.open(generation)
        batch = asyncio.create_task(service.sample_as_json(request))
        while not batch.done():
            said = 0
            await asyncio.sleep(0)
            between.append(said)
        whole = await batch
        assert json.loads(whole) == json.loads((await service.sample(request)).model_dump_json())
        assert whole == (await service.sample(request)).model_dump_json().encode()

    run(play())
    assert sum(between) == 900 and max(between) <= 16
