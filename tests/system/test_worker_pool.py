"""Workers answer one question at a time, and questions wait for an idle one."""

import threading
from types import SimpleNamespace

from classroom_rl.system.worker_pool import WorkerPool


class Doubles:
    """A worker that doubles numbers, once a second one does so at the same time."""

    def __init__(self, pid: int, together: threading.Barrier):
        self.process, self.killed, self._together = SimpleNamespace(pid=pid), False, together

    def ask(self, question: int) -> int:
        self._together.wait(60)
        if question < 0:
            raise ValueError(question)
        return 2 * question

    def kill(self) -> None:
        self.process, self.killed = None, True


def test_questions_are_answered_by_all_workers_which_stay_after_an_error() -> None:
    barrier = threading.Barrier(2)
    workers = [Doubles(pid, barrier) for pid in (1, 2)]
    pool = WorkerPool(workers, "doubling")
    futures = [pool.threads.submit(pool.ask, number) for number in (1, -1, 2, 3)]
    assert isinstance(futures[1].exception(60), ValueError)
    assert [futures[index].result(60) for index in (0, 2, 3)] == [2, 4, 6]
    assert pool.pids == [1, 2]
    pool.shutdown()
    assert pool.pids == [] and all(worker.killed for worker in workers)
