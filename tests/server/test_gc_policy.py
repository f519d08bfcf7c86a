"""Full garbage collections come only while no batch is played."""

import asyncio
import gc
from types import SimpleNamespace

import pytest

from classroom_rl.server import app as garbage


@pytest.fixture
def collections(monkeypatch):
    """The generations that are collected, in order."""
    monkeypatch.setattr(garbage, "_SECONDS_BETWEEN_CHECKS", 0)
    made: list[int] = []
    monkeypatch.setattr(garbage.gc, "collect", made.append)
    yield made
    gc.unfreeze()


async def _look(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def test_it_collects_once_after_each_time_of_playing_and_never_in_it(collections, monkeypatch):
    monkeypatch.setattr(garbage, "_IDLE_PERIODS_PER_FULL_COLLECTION", 3)

    async def play() -> list[list[int]]:
        service = SimpleNamespace(running=[], runner=SimpleNamespace(finished=0))
        task = asyncio.create_task(garbage.collect_at_rest(service))
        found = []
        for running, finished in (([], 0), (["a"], 3), (["a"], 3), ([], 9), ([], 9), (["b"], 12), ([], 14), ([], 20)):
            service.running, service.runner.finished = running, finished
            await _look(5)
            found.append(list(collections))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    full, short = 2, 1
    begun, once, twice = [full], [full, short], [full, short, short]
    assert asyncio.run(play()) == [begun, begun, begun, once, once, once, twice, [*twice, full]]


def test_python_starts_none_meanwhile_and_may_again_afterwards(collections):
    async def during() -> tuple[int, ...]:
        task = asyncio.create_task(
            garbage.collect_at_rest(SimpleNamespace(running=["a"], runner=SimpleNamespace(finished=0)))
        )
        await _look(3)
        found = gc.get_threshold()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    before = gc.get_threshold()
    now = asyncio.run(during())
    assert now[:2] == before[:2] and now[2] > 10**9
    assert gc.get_threshold() == before
