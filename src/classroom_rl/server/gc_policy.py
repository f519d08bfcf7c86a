"""When Python's garbage collector may look at every object: seldom, and only while no batch is played.

A full collection visits all objects, and holds up the event loop meanwhile. Python starts one whenever the objects have
become a quarter more, which happens several times in a large batch. Playing leaves hardly any garbage that only a full
collection finds: what is garbage early, the short collections of young objects still take away.
"""

import asyncio
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from classroom_rl.server.sampling_service import SamplingService

_SECONDS_BETWEEN_LOOKS = 0.5
_NEVER = 2**31 - 1
_RESTS_BETWEEN = 100


async def collect_at_rest(service: "SamplingService") -> None:
    """Keep full collections to every hundredth time that no batch is played any more, until cancelled. After every time
    of playing, what is there then, such as the last answers, is taken out of what collections look at."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        rests, rested, before = 0, -1, 0
        while True:
            finished = service.runner.finished
            if not service.running and finished == before != rested:
                _collect(full=rests % _RESTS_BETWEEN == 0)
                rests, rested = rests + 1, finished
            before = finished
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
    finally:
        gc.set_threshold(*thresholds)


def _collect(full: bool) -> None:
    if full:
        gc.unfreeze()
    gc.collect(2 if full else 1)
    gc.freeze()
