"""An event loop whose clock is turned, and never runs by itself: where nothing is left to do but to wait for a timer,
it is that late at once. While work outside the loop is under way, a request or a thread, the clock stands still. So
pauses and deadlines of any length take no time, and none passes because a machine is slow. A coroutine that loops over
`asyncio.sleep(0)` always has something left to do, and stops the clock.
"""

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2

from tests.support.judge_endpoint import NUMBER, SENT, stalled_requests

_LOOK_S = 0.01
_numbers = itertools.count(1)


class _Selector(selectors.DefaultSelector):
    """Where the loop would wait for its next timer, the clock is turned to it, unless somebody is at work."""

    now = 1000.0
    at_work: Callable[[], bool]

    def select(self, timeout: float | None = None) -> list:
        if not timeout:
            return super().select(timeout)
        events = super().select(0)
        if events:
            return events
        if self.at_work():
            return super().select(_LOOK_S)
        self.now += timeout
        return []


class TurnedLoop(asyncio.SelectorEventLoop):
    """The loop. `time()` is that of its clock, in seconds."""

    def __init__(self) -> None:
        self._turned = _Selector()
        self._turned.at_work = self._at_work
        self._requests: set[str] = set()
        self._jobs = 0
        super().__init__(self._turned)

    def time(self) -> float:
        return self._turned.now

    def run_in_executor(self, executor: Any, func: Callable, *args: Any) -> asyncio.Future:
        """As the method that it replaces; the clock waits for the thread."""
        job = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        job.add_done_callback(self._finish)
        return job

    def _finish(self, _job: asyncio.Future) -> None:
        self._jobs -= 1

    def _at_work(self) -> bool:
        return bool(self._jobs or self._requests - stalled_requests())

    def wait_for_requests_of(self, client: httpx2.AsyncClient) -> None:
        """Let the clock wait for this client's requests, except those that a `judge_endpoint` leaves hanging."""
        send = client.send

        async def noticed(request: httpx2.Request, **options: Any) -> httpx2.Response:
            number = str(next(_numbers))
            request.headers[NUMBER], request.headers[SENT] = number, repr(self.time())
            self._requests.add(number)
            try:
                return await send(request, **options)
            finally:
                self._requests.discard(number)

        client.send = noticed


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, run by such a loop."""
    with asyncio.Runner(loop_factory=TurnedLoop) as runner:
        return runner.run(scenario)
