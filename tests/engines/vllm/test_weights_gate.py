"""New weights wait for messages in flight, and keep later ones out."""

import asyncio

import pytest

from classroom_rl.engines.vllm.weights_gate import WeightsGate
from classroom_rl.errors import DeadlineExceeded
from tests.support.turned_clock import run


def test_gate_waits_for_turns_in_flight_and_keeps_new_ones_out() -> None:
    async def scenario() -> list[str]:
        gate, events = WeightsGate(), []
        inside, leave = asyncio.Event(), asyncio.Event()

        async def early_turn() -> None:
            async with gate.turn():
                inside.set()
                await leave.wait()
                events.append("early turn ended")

        async def late_turn() -> None:
            async with gate.turn():
                events.append("late turn")

        async def load() -> None:
            async with gate.closed(60):
                events.append("loading")
                await asyncio.sleep(0.01)
                events.append("loaded")

        tasks = [asyncio.create_task(early_turn())]
        await inside.wait()
        tasks.append(asyncio.create_task(load()))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(late_turn()))
        await asyncio.sleep(0.01)
        leave.set()
        await asyncio.gather(*tasks)
        return events

    assert run(scenario()) == ["early turn ended", "loading", "loaded", "late turn"]


def test_gate_opens_again_after_its_deadline() -> None:
    async def scenario() -> None:
        gate = WeightsGate()
        async with gate.turn():
            with pytest.raises(DeadlineExceeded, match="1 turns were still being sampled"):
                async with gate.closed(0.01):
                    raise AssertionError("a turn was still inside")
            async with asyncio.timeout(60), gate.turn():
                pass

    run(scenario())


def test_cancelled_turn_leaves_the_gate() -> None:
    async def scenario() -> None:
        gate = WeightsGate()

        async def stay() -> None:
            async with gate.turn():
                await asyncio.sleep(60)

        task = asyncio.create_task(stay())
        await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(60), gate.closed(60):
            pass

    run(scenario())
