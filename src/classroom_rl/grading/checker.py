"""Grades maths solutions: compares the boxed answer with the reference.

The answer is the last `\\boxed{…}` of a solution; a solution without one is wrong. Comparing the texts decides most
answers. math-verify decides the others, in worker processes: its own timeout works only in a program's main thread, and
cannot interrupt a long multiplication even there.
"""

import asyncio
import json
import logging
import multiprocessing
import os

from classroom_rl.errors import EngineFailure
from classroom_rl.grading.forms import Pair, compare_as_text, extract_boxed
from classroom_rl.grading.worker import READY, serve
from classroom_rl.system.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

WORKERS = min(4, os.cpu_count() or 1)
_START_TIMEOUT_S = 120.0


class AnswerChecker:
    """Compares answers, `workers` of them at a time.

    A worker process starts when it is first needed and is reused. If it does not decide within `timeout_s` seconds, it
    is killed, and the answer counts as wrong; so it does if the worker dies. `given_up` counts these answers.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = WORKERS):
        self.given_up = 0
        self._ended = False
        self._timeout_s = timeout_s
        self._pool: WorkerPool[list[Pair], bool] = WorkerPool([_Worker(timeout_s) for _ in range(workers)], "answers")

    async def is_correct(self, solution: str, answer: str) -> bool:
        """Whether the boxed answer of a solution equals the reference `answer`, which may be boxed or not.

        Raises:
            EngineFailure: if a worker cannot be started, or `shutdown` ended it.
        """
        boxed = extract_boxed(solution)
        if boxed is None:
            return False
        decided = compare_as_text(boxed, answer)
        if isinstance(decided, bool):
            return decided
        return await asyncio.get_running_loop().run_in_executor(self._pool.threads, self._ask, decided)

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return self._pool.pids

    def shutdown(self) -> None:
        """End all workers. Comparisons that are running fail with `EngineFailure`; those that wait are cancelled."""
        self._ended = True
        self._pool.shutdown()

    def _ask(self, question: list[Pair]) -> bool:
        equal = self._pool.ask(question)
        if self._ended:
            raise EngineFailure("The processes that compare answers were ended while this program shuts down.")
        if equal is None:
            self.given_up += 1
            logger.warning(
                "no verdict within %g s on the answer %.200r, wanted %.200r: it counts as wrong (%d so far)",
                self._timeout_s,
                *question[0],
                self.given_up,
            )
        return bool(equal)


class _Worker:
    """One worker process. `ask` starts it if it does not run."""

    def __init__(self, timeout_s: float):
        self.process: multiprocessing.process.BaseProcess | None = None
        self._timeout_s = timeout_s

    def ask(self, question: list[Pair]) -> bool | None:
        """Whether one of the pairs is equal; None if the process died, or was killed after `timeout_s` seconds."""
        if self.process is None or self._pipe.poll():  # it sends nothing unasked, so the process has ended
            self._start()
        try:
            self._pipe.send_bytes(json.dumps(question).encode())
            if self._pipe.poll(self._timeout_s):
                return json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):  # the process died; the caller logs that there is no verdict
            pass
        self.kill()
        return None

    def kill(self) -> None:
        """Kill the process, if it runs."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._timeout_s), name="answers", daemon=True)
        process.start()
        theirs.close()  # else this process holds the worker's end open, and never sees that the worker died
        self.process = process
        try:
            ready = self._pipe.poll(_START_TIMEOUT_S) and self._pipe.recv_bytes() == READY
        except EOFError:
            ready = False
        if not ready:
            self.kill()
            raise EngineFailure(
                f"The process that compares answers was not ready within {_START_TIMEOUT_S:g} s, or died: see the "
                "lines before this one. Is math-verify installed? `make setup` installs it."
            )
