"""Grades maths solutions: compares the boxed answer with the reference answer.

The answer is the last `\\boxed{…}` of a solution; a solution without one is wrong. For most answers, it is enough to
compare the texts. math-verify decides the others, in worker processes: its own timeout works only in a program's main
thread, and even there it cannot interrupt a long multiplication.
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
    """Compares answers, up to `workers` of them at a time.

    A worker process starts when it is first needed and is reused. If it takes longer than `timeout_s` seconds, it is
    killed. Then, and if the worker dies, the answer counts as wrong. `given_up` counts these answers.
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
        result = compare_as_text(boxed, answer)
        if isinstance(result, bool):
            return result
        return await asyncio.get_running_loop().run_in_executor(self._pool.threads, self._ask, result)

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return self._pool.pids

    def shutdown(self) -> None:
        """End all workers. Running comparisons fail with `EngineFailure`; waiting ones are cancelled."""
        self._ended = True
        self._pool.shutdown()

    def _ask(self, question: list[Pair]) -> bool:
        is_equal = self._pool.ask(question)
        if self._ended:
            raise EngineFailure("The processes that compare answers were ended while this program shuts down.")
        if is_equal is None:
            self.given_up += 1
            logger.warning(
                "no verdict within %g s on the answer %.200r, wanted %.200r: it counts as wrong (%d so far)",
                self._timeout_s,
                *question[0],
                self.given_up,
            )
        return bool(is_equal)


class _Worker:
    """One worker process. `ask` starts it if it does not run."""

    def __init__(self, timeout_s: float):
        self.process: multiprocessing.process.BaseProcess | None = None
        self._timeout_s = timeout_s

    def ask(self, question: list[Pair]) -> bool | None:
        """Whether any of the pairs is equal; None if the process died, or was killed after `timeout_s` seconds."""
        # The worker sends nothing without a question, so readable data means that its end of the pipe is closed.
        if self.process is None or self._pipe.poll():
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
        self._pipe, worker_end = context.Pipe()
        process = context.Process(target=serve, args=(worker_end, self._timeout_s), name="answers", daemon=True)
        process.start()
        worker_end.close()  # otherwise the pipe stays open when the worker dies, and this process would not notice
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
