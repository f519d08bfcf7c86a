"""A client of a misbehaving endpoint, on a clock that is turned: pauses and deadlines take no time."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from classroom_rl.config.models import ApiModelConfig
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi, ChatRequest
from classroom_rl.rollout.engine import Sampling
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, Script
from tests.support.turned_clock import run

PRICES = {"usd_per_million_prompt_tokens": 0.30, "usd_per_million_completion_tokens": 2.50}
LONG = "word " * 40


def in_turn(*behaviours: Behaviour) -> Script:
    """A script that answers repeated requests with one behaviour after the other, then with the last one again."""
    return lambda body, nth: behaviours[min(nth, len(behaviours) - 1)]


def question(text: str = "why?", schema: dict | None = None, max_tokens: int = 50, draw: int = 0) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": text}], Sampling(0.6, 0.9, max_tokens=max_tokens), schema, (draw,))


def timed_api(config: ApiModelConfig, ledger: CallLedger, role: str = "judge") -> ChatApi:
    """An API on the clock of the `TurnedLoop` that runs. It wakes a little late, as on any machine: with exact pauses
    the same of many requests that wait would always come first."""
    loop, rng = asyncio.get_running_loop(), random.Random(1)
    api = ChatApi(config, ledger, role, loop.time, lambda s: asyncio.sleep(s * rng.uniform(1.0, 1.05)))
    loop.wait_for_requests_of(api._client._client)
    return api


class Client:
    """A client of one endpoint, with its ledger on disk."""

    def __init__(self, endpoint: JudgeEndpoint, folder: Path, **options):
        options = {"model_name_or_path": "first", "base_url": endpoint.url} | options
        self.config = ApiModelConfig(**options)
        self.ledger = CallLedger(folder / "calls.sqlite", self.config.max_cost_usd)

    def run(self, work: Callable[[ChatApi], Awaitable]):
        async def whole():
            api = timed_api(self.config, self.ledger)
            try:
                return await work(api)
            finally:
                await api.drain()
                await api._client.close()

        return run(whole())

    def ask(self, request: ChatRequest | None = None) -> str:
        async def one(api: ChatApi) -> str:
            return (await api.ask(request or question())).text

        return self.run(one)

    def ask_all(self, count: int, **options) -> list[str | Exception]:
        async def many(api: ChatApi) -> list:
            answers = (api.ask(question(f"question {i}", **options)) for i in range(count))
            return await asyncio.gather(*answers, return_exceptions=True)

        return [outcome if isinstance(outcome, Exception) else outcome.text for outcome in self.run(many)]
