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
        self._request: SampleRequest | None = None
        self._answer: Future[SampleResponse] | None = None

    def start(self, request: SampleRequest) -> None:
        """Send a request; returns at once."""
        self._request, self._answer = request, Future()
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

    def take(self, step: int) -> tuple[SampleRequest, Callable[[], SampleResponse]] | None:
        """The request for this step's batch, and a function that returns its answer or raises its error; None if no
        such batch was begun."""
        request, answer = self._request, self._answer
        self._request = self._answer = None
        return None if request is None or request.step != step else (request, answer.result)
