"""`generation.schedule: phased`: all conversations do the same thing at a time, so that only the engines of that phase
need room on the GPU; the others sleep.

One clock serves the whole server. Every conversation of every request is counted in as its request begins, and out as
it ends. A conversation that needs another phase than the present one waits; when all that are counted wait, the clock
moves on to the next phase in the table that any of them waits for. So several requests at a time (one for each rank of
a trainer, sixteen of an evaluation) share their phases, whichever came first, and cannot block each other: there is no
lock that one could hold while it waits for another. A request that comes in the middle joins the present phase if that
is what it needs, and else waits for the clock to come round. When no conversation is left, the clock goes back to the
first phase.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from src.errors import ClassroomError

logger = logging.getLogger(__name__)

PHASED = "phased"
"""The value of `generation.schedule` that this clock is for."""


@dataclass(frozen=True)
class Phase:
    """What is done, in which states of an episode, with which seats."""

    name: str
    states: tuple[Hashable, ...]
    seats: tuple[str, ...]


def phase_of(phases: Sequence[Phase], state: Hashable) -> Phase:
    """The phase that an episode in this state belongs to."""
    return next(phase for phase in phases if state in phase.states)


class Attendance(Protocol):
    """The conversations of one request, as a schedule counts them."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        """None of them is left."""

    async def reach(self, state: Hashable) -> None:
        """Wait until one of them may do what belongs to this state."""

    def leave(self) -> None:
        """One of them has ended."""


class Schedule(Protocol):
    """When conversations may do what."""

    def attend(self, count: int) -> Attendance: ...


class Concurrent:
    """Each conversation for itself; nobody waits."""

    def attend(self, count: int) -> "Concurrent":
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody is counted."""

    async def reach(self, state: Hashable) -> None:
        """At once."""

    def leave(self) -> None:
        """Nobody is counted."""


class PhaseClock:
    """The present phase, who is counted, and who waits for which phase.

    Args:
        wake_only: makes the engines of these seats ready, and has the others sleep.
        phases: in their order; it begins with the first.
    """

    def __init__(self, wake_only: Callable[[Collection[str]], Awaitable[None]], phases: Sequence[Phase]):
        self._phases = phases
        self._wake_only = wake_only
        self._phase: Phase | None = phases[0]  # None: the engines could not be made ready
        self._counted = 0
        self._waiting: dict[Phase, list[asyncio.Future[None]]] = {phase: [] for phase in phases}
        self._move: asyncio.Task[None] | None = None

    def attend(self, count: int) -> "_Attendance":
        """Count so many conversations in, until they have left; to be used as a context."""
        return _Attendance(self, count)

    def count(self, change: int) -> None:
        """Count conversations in, or out."""
        self._counted += change
        self._move_on()

    async def reach(self, state: Hashable) -> None:
        """Wait until it is the phase of this state; for episodes that are counted.

        Raises:
            ClassroomError: if its engines could not be made ready.
        """
        phase = phase_of(self._phases, state)
        if phase is self._phase and self._move is None:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[phase].append(turn)
        self._move_on()
        try:
            await turn
        finally:
            if turn in self._waiting[phase]:
                self._waiting[phase].remove(turn)

    def _next(self) -> Phase | None:
        """Where the clock has to move now; None if it stays."""
        if self._counted == 0:
            return self._phases[0] if self._phase is not self._phases[0] else None
        if sum(map(len, self._waiting.values())) < self._counted:
            return None
        present = self._phases.index(self._phase) if self._phase is not None else -1
        round_trip = (*self._phases[present + 1 :], *self._phases[: present + 1])
        return next(phase for phase in round_trip if self._waiting[phase])

    def _move_on(self) -> None:
        if self._move is None and (phase := self._next()) is not None:
            self._move = asyncio.create_task(self._move_to(phase))  # whoever waits may go; the move is made to its end

    async def _move_to(self, phase: Phase) -> None:
        logger.info("phase: %s", phase.name)
        try:
            await self._wake_only(phase.seats)
        except BaseException as error:
            self._arrive(phase, error)
            if not isinstance(error, ClassroomError):
                raise
        else:
            self._arrive(phase, None)

    def _arrive(self, phase: Phase, failure: BaseException | None) -> None:
        """Let go who waits for the phase: to work, or to fail with what kept its engines from getting ready."""
        self._phase, self._move = (phase if failure is None else None), None
        turns, self._waiting[phase] = self._waiting[phase], []
        for turn in (each for each in turns if not each.done()):
            if failure is None:
                turn.set_result(None)
            else:
                turn.set_exception(failure)
        if failure is None or turns:
            self._move_on()
        elif isinstance(failure, ClassroomError):  # nobody waits for it; whoever comes next makes it try again
            logger.error("the engines of the phase %s are not ready: %s", phase.name, failure)


class _Attendance:
    def __init__(self, clock: PhaseClock, count: int):
        self._clock, self._left = clock, count

    def __enter__(self) -> Self:
        self._clock.count(self._left)
        return self

    def __exit__(self, *_: object) -> None:
        left, self._left = self._left, 0
        self._clock.count(-left)

    async def reach(self, state: Hashable) -> None:
        await self._clock.reach(state)

    def leave(self) -> None:
        self._left -= 1
        self._clock.count(-1)
