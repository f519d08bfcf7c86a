"""Many requests at once, of which one failure stops all."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_stop(asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. Unlike with `asyncio.gather`, the first error cancels the rest; it is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in asked]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
