"""Grades maths solutions: compares the boxed answer with the reference answer.

The answer is the last `\\boxed{…}` of a solution; a solution without one is wrong. For most answers, it is enough to
compare the texts. math-verify decides the others, in worker processes: its own timeout works only in a program's main
thread, and even there it cannot interrupt a long multiplication. A model's text can keep a parser or a computer algebra
system busy forever, or use up all memory; then the worker is killed.

No text of a model is evaluated as code. Sympy's `parse_expr` calls Python's `eval`. math-verify passes plain
expressions to it, so only its LaTeX parser is used (latex2sympy2_extended), which builds expressions node by node. But
that parser creates numbers with `sympy.Number(text)`, which also calls `parse_expr`. So a worker replaces `parse_expr`
with a function that parses only numbers. It also cannot write files, start programs or open connections, and its memory
and CPU time are limited.
"""

import asyncio
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from classroom_rl.errors import EngineFailure
from classroom_rl.grading.forms import Pair, compare_as_text, extract_boxed
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
            is_ready = self._pipe.poll(_START_TIMEOUT_S) and self._pipe.recv_bytes() == READY
        except EOFError:
            is_ready = False
        if not is_ready:
            self.kill()
            raise EngineFailure(
                f"The process that compares answers was not ready within {_START_TIMEOUT_S:g} s, or died: see the "
                "lines before this one. Is math-verify installed? `make setup` installs it."
            )


# In the worker process -----------------------------------------------------------------------------------------------


READY = b"ready"
_DECIMAL = re.compile(r"\d+(\.\d*)?([eE][+-]?\d{1,3})?|\.\d+([eE][+-]?\d{1,3})?", re.ASCII)
_MEMORY_LIMIT = 2 * 2**30
_FORBIDDEN_EVENTS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"}
)


def serve(pipe: Connection, timeout_s: float) -> None:
    """Answer questions until the other end of the pipe closes. A question is a list of pairs of LaTeX expressions; the
    answer is whether the expressions of any pair are equal. Both are JSON.

    Args:
        timeout_s: limit on the CPU time of one question, in seconds. It ends the process if the parent, which normally
            kills it, is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which ends this process
    logging.disable()
    _replace_eval()
    _are_equal("1", "1")  # triggers all lazy imports before privileges are dropped
    _drop_privileges()
    pipe.send_bytes(READY)
    while True:
        try:
            question: list[Pair] = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        _limit_cpu_time(timeout_s)
        pipe.send_bytes(json.dumps(any(_are_equal(answer, reference) for answer, reference in question)).encode())


def _are_equal(answer: str, reference: str) -> bool:
    """Whether math-verify finds the two LaTeX expressions equal; False if it cannot parse one of them."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # Without units, because forms.py has removed them, and math-verify would take the t of "5t" for a unit.
    normalisation = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all")
    latex_only = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalisation)]
    parsed = [
        parse(rf"\boxed{{{text}}}", latex_only, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (reference, answer)
    ]
    return verify(*parsed, allow_set_relation_comp=True, timeout_seconds=None)


def _replace_eval() -> None:
    import sympy.physics.units  # noqa: F401  `simplify` would import it later, and the import needs the real parse_expr
    from sympy.parsing import sympy_parser

    sympy_parser.parse_expr = _read_number


def _read_number(text: str, **_: Any) -> Any:
    """The number in a text; replaces `parse_expr`.

    Raises:
        SyntaxError: if the text is not a number; sympy handles this as an expression that it cannot parse.
    """
    from sympy import Float, Integer

    if not _DECIMAL.fullmatch(text):
        raise SyntaxError(f"no number: {text!r}")
    return Integer(int(text)) if text.isdigit() else Float(text)


def _drop_privileges() -> None:
    """Clear the environment (it may hold keys), limit memory, and forbid writing files and `_FORBIDDEN_EVENTS`."""
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, _MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_refuse)


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    """An audit hook that forbids what a comparison never needs: starting programs and opening connections."""
    if event in _FORBIDDEN_EVENTS:
        raise PermissionError(f"{event} in a process that only compares answers")


def _limit_cpu_time(seconds: float) -> None:
    """Let the kernel end this process after this many further seconds of CPU time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
