"""Plays the next batch while this one is judged and trained on: `train.max_staleness: 1`."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from classroom_rl.rollout.requests import SampleRequest, SampleResponse


@dataclass
class BatchInFlight:
    """One rank's part of a batch that the server plays.

    Attributes:
        step: the optimizer step that it is for.
        played: done when no message of the policy is missing, or with the error of a batch that failed before.
        answer: the judged conversations, or the error.
    """

    step: int
    played: "Future[None]" = field(default_factory=Future)
    answer: "Future[SampleResponse]" = field(default_factory=Future)


class NextBatch:
    """Sends one rank's requests, each from a thread that awaits it. At most one batch is in flight that was not taken.

    Args:
        play: sends a request and waits until no message of the policy is missing in it.
        sample: sends a request and waits for its judged conversations.
    """

    def __init__(self, play: Callable[[SampleRequest], None], sample: Callable[[SampleRequest], SampleResponse]):
        self._play, self._sample = play, sample
        self._next: BatchInFlight | None = None

    def start(self, request: SampleRequest) -> None:
        """Send a request; returns at once."""
        self._next = BatchInFlight(request.step)
        threading.Thread(target=self._run, args=(request, self._next), name="next batch", daemon=True).start()

    def _run(self, request: SampleRequest, batch: BatchInFlight) -> None:
        try:
            self._play(request)
            batch.played.set_result(None)
            # `play` has begun to repeat the judge's failed attempts, which is to be done once.
            batch.answer.set_result(self._sample(request.model_copy(update={"judge_again": False})))
        except BaseException as error:  # raised where the batch is taken
            for missing in (each for each in (batch.played, batch.answer) if not each.done()):
                missing.set_exception(error)

    def wait(self) -> None:
        """Wait until the policy is not needed in the batch any more, or it has failed: new weights must not be loaded
        before, or its conversations would be of two policies."""
        if self._next is not None:
            self._next.played.exception()

    def take(self, step: int) -> BatchInFlight | None:
        """The batch of this step; None if it was not begun."""
        batch, self._next = self._next, None
        return None if batch is None or batch.step != step else batch
