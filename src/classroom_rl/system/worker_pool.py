"""A pool of worker processes that each answer one question at a time and can be killed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

Question = TypeVar("Question", contravariant=True)
Answer = TypeVar("Answer", covariant=True)


class Worker(Protocol[Question, Answer]):
    """One worker. `process` has a `pid`; it is None while no process runs."""

    process: Any

    def ask(self, question: Question) -> Answer | None:
        """The answer; None if the process died, or was killed because it took too long. Starts the process if it does
        not run."""

    def kill(self) -> None:
        """Kill the process, if it runs."""


class WorkerPool(Generic[Question, Answer]):
    """Workers that each answer one question at a time; further questions wait for an idle worker.

    Args:
        workers: their processes need not run yet.
        name: the name of the threads that wait for answers.

    Attributes:
        threads: the threads in which to call `ask`, one for each worker.
    """

    def __init__(self, workers: Sequence[Worker[Question, Answer]], name: str):
        self.threads = ThreadPoolExecutor(len(workers), thread_name_prefix=name)
        self._workers = list(workers)
        self._idle: SimpleQueue[Worker[Question, Answer]] = SimpleQueue()
        for worker in workers:
            self._idle.put(worker)

    def ask(self, question: Question) -> Answer | None:
        """Wait for an idle worker and return its answer. Raises the errors of `Worker.ask`."""
        worker = self._idle.get()
        try:
            return worker.ask(question)
        finally:
            self._idle.put(worker)

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def shutdown(self) -> None:
        """End all workers. Waiting questions are cancelled."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
