"""Plays the next batch while this one is trained on: `train.max_staleness: 1`."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from src.rollout.requests import SampleRequest, SampleResponse


class NextBatch:
    """One rank's request for its part of the next batch, which a thread sends and awaits. There is at most one.

    Args:
        sample: sends a request and waits for its conversations.
    """

    def __init__(self, sample: Callable[[SampleRequest], SampleResponse]):
        self._sample = sample
        self._step = -1
        self._answer: Future[SampleResponse] | None = None

    def start(self, request: SampleRequest) -> None:
        """Send a request; returns at once."""
        self._step, self._answer = request.step, Future()
        threading.Thread(target=self._run, args=(request, self._answer), name="next batch", daemon=True).start()

    def _run(self, request: SampleRequest, answer: "Future[SampleResponse]") -> None:
        try:
            answer.set_result(self._sample(request))
        except BaseException as error:  # raised where the answer is taken
            answer.set_exception(error)

    def wait(self) -> None:
        """Wait until the batch is played or has failed: new weights must not be loaded before, or its conversations
        would be of two policies."""
        if self._answer is not None:
            self._answer.exception()

    def take(self, step: int) -> Callable[[], SampleResponse] | None:
        """A function that returns the answer of this step's batch, or raises its error; None if no such batch was
        begun."""
        answer, self._answer = self._answer, None
        return None if answer is None or self._step != step else answer.result
