"""Schedules: when the episodes of a server may go on, each by itself or all in the same phase.

With `generation.schedule: phased`, all are in the same phase. Only the engines of the current phase are awake; the
others sleep, so models that do not fit on the GPU together can take turns.

One schedule serves the whole server. A request registers its episodes when it begins, and each episode deregisters when
it ends. An episode that needs another phase than the current one waits. Once all registered episodes wait, the schedule
switches to the next phase in the table that any of them waits for. Concurrent requests (one for each rank of a trainer,
sixteen of an evaluation) therefore share their phases. They cannot deadlock, because no request holds a lock while it
waits. A request that begins in the middle joins the current phase if it needs that one, and otherwise waits for its
phase. When no episode is registered, the schedule returns to the first phase.

When thousands of episodes become ready at once, the event loop would run all of them before anything else, and the
server would not answer for seconds. An episode therefore passes a yield gate before each of its steps.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from classroom_rl.errors import ClassroomError

logger = logging.getLogger(__name__)


_PER_PASS = 8


class YieldGate:
    """Lets about `per_pass` coroutines through in each pass of the event loop, never more than twice as many, in the
    order of their arrival."""

    def __init__(self, per_pass: int = _PER_PASS):
        self._per_pass = per_pass
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def go_through(self) -> None:
        """Go on at once, or in a later pass of the event loop."""
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._begin_pass)
        if self._passed < self._per_pass and not self._waiting:
            self._passed += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _begin_pass(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._per_pass:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its coroutine was cancelled
                waiter.set_result(None)
                self._passed += 1
        self._counting = self._passed > 0
        if self._counting:
            asyncio.get_running_loop().call_soon(self._begin_pass)


PHASED = "phased"
"""The value of `generation.schedule` that asks for `PhasedSchedule`."""


@dataclass(frozen=True)
class Phase:
    """A phase: the states of an episode that belong to it, and the roles whose engines it needs."""

    name: str
    states: tuple[Hashable, ...]
    roles: tuple[str, ...]


def phase_of(phases: Sequence[Phase], state: Hashable) -> Phase:
    """The phase that an episode in this state belongs to."""
    return next(phase for phase in phases if state in phase.states)


class Registration(Protocol):
    """The registered episodes of one request; as a context manager, it deregisters those that are left at its end."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        """Deregister the episodes that have not ended."""

    async def wait_for_phase(self, state: Hashable) -> None:
        """Wait until an episode in this state may go on."""

    def deregister_one(self) -> None:
        """Deregister an episode that has ended."""


class Schedule(Protocol):
    """Decides when episodes may go on."""

    def register(self, count: int) -> Registration:
        """Register this many episodes of one request."""


class ConcurrentSchedule:
    """Lets every episode go on at once; it is its own registration, because it counts nothing."""

    def register(self, count: int) -> "ConcurrentSchedule":
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to deregister."""

    async def wait_for_phase(self, state: Hashable) -> None:
        """Return at once."""

    def deregister_one(self) -> None:
        """Nothing to deregister."""


class PhasedSchedule:
    """Lets all episodes go through one phase before any begins the next.

    Args:
        wake_only: wakes the engines of these roles and puts the others to sleep.
        phases: in their order; the schedule begins with the first.
    """

    def __init__(self, wake_only: Callable[[Collection[str]], Awaitable[None]], phases: Sequence[Phase]):
        self._phases = phases
        self._wake_only = wake_only
        self._phase: Phase | None = phases[0]  # None: its engines could not be woken
        self._registered = 0
        self._waiting: dict[Phase, list[asyncio.Future[None]]] = {phase: [] for phase in phases}
        self._switch: asyncio.Task[None] | None = None

    def register(self, count: int) -> "_Registration":
        """Register episodes; to be used as a context manager."""
        return _Registration(self, count)

    def change_registered(self, change: int) -> None:
        """Change the number of registered episodes."""
        self._registered += change
        self._switch_if_due()

    async def wait_for_phase(self, state: Hashable) -> None:
        """Wait until the current phase is that of this state; for registered episodes. Raises a `ClassroomError` if the
        engines of the phase could not be woken."""
        phase = phase_of(self._phases, state)
        if phase is self._phase and self._switch is None:
            return
        entered = asyncio.get_running_loop().create_future()
        self._waiting[phase].append(entered)
        self._switch_if_due()
        try:
            await entered
        finally:
            if entered in self._waiting[phase]:
                self._waiting[phase].remove(entered)

    def _due_phase(self) -> Phase | None:
        """The phase to switch to now; None to stay."""
        if self._registered == 0:
            return self._phases[0] if self._phase is not self._phases[0] else None
        if sum(map(len, self._waiting.values())) < self._registered:
            return None
        current = self._phases.index(self._phase) if self._phase is not None else -1
        round_trip = (*self._phases[current + 1 :], *self._phases[: current + 1])
        return next(phase for phase in round_trip if self._waiting[phase])

    def _switch_if_due(self) -> None:
        if self._switch is None and (phase := self._due_phase()) is not None:
            # In its own task, so that the cancellation of a waiting episode does not interrupt the switch.
            self._switch = asyncio.create_task(self._switch_to(phase))

    async def _switch_to(self, phase: Phase) -> None:
        logger.info("phase: %s", phase.name)
        try:
            await self._wake_only(phase.roles)
        except BaseException as error:
            self._end_switch(phase, error)
            if not isinstance(error, ClassroomError):
                raise
        else:
            self._end_switch(phase, None)

    def _end_switch(self, phase: Phase, failure: BaseException | None) -> None:
        """Wake the episodes that wait for the phase; if its engines could not be woken, with that failure."""
        self._phase, self._switch = (phase if failure is None else None), None
        waiting, self._waiting[phase] = self._waiting[phase], []
        for waiter in (future for future in waiting if not future.done()):
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)
        if failure is None or waiting:
            self._switch_if_due()
        elif isinstance(failure, ClassroomError):  # no episode waits that could raise it; the next one tries again
            logger.error("the engines of the phase %s are not ready: %s", phase.name, failure)


class _Registration:
    def __init__(self, schedule: PhasedSchedule, count: int):
        self._schedule, self._left = schedule, count

    def __enter__(self) -> Self:
        self._schedule.change_registered(self._left)
        return self

    def __exit__(self, *_: object) -> None:
        remaining, self._left = self._left, 0
        self._schedule.change_registered(-remaining)

    async def wait_for_phase(self, state: Hashable) -> None:
        await self._schedule.wait_for_phase(state)

    def deregister_one(self) -> None:
        self._left -= 1
        self._schedule.change_registered(-1)
