"""When Python's garbage collector may look at every object: only while no batch is played.

A full collection visits all objects, and holds up the event loop meanwhile. Python starts one whenever the objects have
become a quarter more, which happens several times in a large batch. Playing leaves hardly any garbage that only a full
collection finds: what is garbage early, the short collections of young objects still take away.
"""

import asyncio
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from src.server.sampling_service import SamplingService

_SECONDS_BETWEEN_LOOKS = 0.5
_NEVER = 2**31 - 1


async def collect_at_rest(service: "SamplingService") -> None:
    """Keep full collections to the times when no batch is played, until cancelled. Each looks only at what came since
    the one before it; so the first one also takes what the server loaded out of the later ones."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        _collect()
        collected = seen = service.runner.finished
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            if not service.running and service.runner.finished == seen != collected:
                _collect()
                collected = seen
            seen = service.runner.finished
    finally:
        gc.set_threshold(*thresholds)


def _collect() -> None:
    gc.collect()
    gc.freeze()
