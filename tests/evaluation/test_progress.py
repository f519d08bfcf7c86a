"""Concurrent requests of an evaluation stop at the first failure, and its progress is logged."""

import asyncio
import logging

import pytest

from classroom_rl.evaluation import progress
from classroom_rl.evaluation.progress import EvaluationProgress, gather_or_stop


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def test_results_are_in_the_order_of_their_coroutines():
    assert await gather_or_stop(map(double, [3, 1, 2])) == [6, 2, 4]


async def test_the_first_failure_is_raised_itself_and_cancels_the_rest():
    cancelled = []

    async def wait_for_ever():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        await gather_or_stop([wait_for_ever(), fail()])
    assert cancelled == [True]


@pytest.mark.parametrize(("seconds_between_lines", "lines"), [(3600.0, [3]), (-1.0, [1, 2, 3])])
def test_without_a_terminal_progress_is_logged_now_and_then_and_at_the_end(
    seconds_between_lines: float, lines: list[int], monkeypatch: pytest.MonkeyPatch, caplog
):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", seconds_between_lines)
    with caplog.at_level(logging.INFO), EvaluationProgress(3, "asking", "replies") as display:
        for _ in range(3):
            display.add(1)
    assert caplog.messages == [f"asking: {done} of 3 replies" for done in lines]
