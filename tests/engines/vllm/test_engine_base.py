"""How many turns an engine gets at a time, and when it counts as hung, on a clock that is turned."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.engines.vllm.engine import VllmEngine
from classroom_rl.engines.vllm.engine_base import TurnDeadlines
from classroom_rl.engines.vllm.weights_gate import WeightsGate
from classroom_rl.errors import ContextOverflow, DeadlineExceeded, EngineFailure
from classroom_rl.rollout.engine import Sampling
from tests.support.turned_clock import run

TURN_S = 60.0
TIMEOUT_S = 100.0


class SlowLLM:
    """In place of vLLM's `AsyncLLM`: takes whatever comes, and works on so many turns at a time, each for a minute."""

    def __init__(self, tokenizer, at_a_time: int, hangs: bool = False):
        self.model_config = SimpleNamespace(enable_sleep_mode=False, try_get_generation_config=dict)
        self.most = self._given = 0
        self._tokenizer = tokenizer
        self._work = asyncio.Semaphore(at_a_time)
        self._hangs = hangs

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    async def generate(self, *_: object, **__: object) -> AsyncIterator[SimpleNamespace]:
        self._given += 1
        self.most = max(self.most, self._given)
        try:
            async with self._work:
                await asyncio.sleep(1e9 if self._hangs else TURN_S)
        finally:
            self._given -= 1
        output = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-1.0)}], finish_reason="length")
        yield SimpleNamespace(finished=True, outputs=[output])


def engine(llm: SlowLLM, max_num_seqs: int) -> VllmEngine:
    model = ModelConfig("slow", VllmConfig(max_length=100, max_num_seqs=max_num_seqs))
    return VllmEngine(llm, model, [], [], GenerationConfig(turn_timeout_s=TIMEOUT_S, sample_timeout_s=10_000.0))


def turn(model: VllmEngine) -> Coroutine[Any, Any, Any]:
    return model.generate([1, 2, 3], Sampling(1.0, max_tokens=4))


@pytest.mark.parametrize(("places", "at_a_time"), [(2, 2), (8, 1)])
def test_waiting_in_a_queue_is_no_hanging(tokenizer, places: int, at_a_time: int) -> None:
    """Ten minutes of turns on an engine that has two places, and on one whose cache holds fewer than it has places."""
    llm = SlowLLM(tokenizer, at_a_time)

    async def scenario() -> list:
        model = engine(llm, places)
        return await asyncio.gather(*(turn(model) for _ in range(10)))

    assert [answer.ids for answer in run(scenario())] == [(5,)] * 10
    assert llm.most == places


def test_an_engine_that_finishes_nothing_is_given_up_after_its_time(tokenizer) -> None:
    async def scenario() -> list:
        model = engine(SlowLLM(tokenizer, at_a_time=2, hangs=True), max_num_seqs=2)
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(EngineFailure, match=r"slow did not finish a turn within generation.turn_timeout_s = 100 s"):
            async with asyncio.timeout(5_000):
                await asyncio.gather(*(turn(model) for _ in range(10)))
        return loop.time() - started

    assert run(scenario()) == pytest.approx(TIMEOUT_S, abs=5)  # of the loop's clock


def test_a_turn_has_its_time_after_the_last_end_of_another() -> None:
    async def scenario() -> float:
        deadlines, loop = TurnDeadlines(TIMEOUT_S), asyncio.get_running_loop()
        loop.call_later(TIMEOUT_S * 0.5, deadlines.extend)
        loop.call_later(TIMEOUT_S * 1.2, deadlines.extend)
        started = loop.time()
        with pytest.raises(TimeoutError):
            async with deadlines.deadline():
                await asyncio.sleep(1e9)
        async with deadlines.deadline():
            pass
        return loop.time() - started

    assert run(scenario()) == pytest.approx(TIMEOUT_S * 2.2, abs=5)


def test_new_weights_wait_for_the_turns_in_the_engine_and_not_for_the_queue(tokenizer) -> None:
    async def scenario() -> None:
        model = engine(SlowLLM(tokenizer, at_a_time=2), max_num_seqs=2)
        turns = [asyncio.create_task(turn(model)) for _ in range(10)]
        await asyncio.sleep(1)
        async with model.gate.closed(1.5 * TURN_S):
            assert sum(task.done() for task in turns) == 2
        await asyncio.gather(*turns)

    run(scenario())


def test_a_place_is_waited_for_with_a_deadline_and_given_back() -> None:
    async def scenario() -> None:
        gate = WeightsGate(patience_s=30.0, places=1)
        async with gate.turn():
            with pytest.raises(DeadlineExceeded, match=r"no place free within 30 s. Raise its vllm.max_num_seqs"):
                async with gate.turn():
                    raise AssertionError("two had one place")
        late = asyncio.create_task(gate.close(5.0))
        await late
        for _ in range(3):  # who gives up in front of the closed gate leaves no place taken
            with pytest.raises(DeadlineExceeded, match="did not take up work again"):
                async with gate.turn():
                    raise AssertionError("the gate was closed")
        gate.open()
        async with asyncio.timeout(5), gate.turn():
            pass

    run(scenario())


def test_a_full_context_is_told_from_other_errors(tokenizer) -> None:
    async def scenario() -> None:
        model = engine(SlowLLM(tokenizer, at_a_time=2), max_num_seqs=2)
        assert (await model.generate([1] * 99, Sampling(1.0, max_tokens=4))).ids == (5,)
        with pytest.raises(ContextOverflow, match=r"A prompt of 100 tokens does not fit into slow's context"):
            await model.generate([1] * 100, Sampling(1.0, max_tokens=4))

    run(scenario())
