"""The tool `calculator`: exact arithmetic in worker processes, which are killed if they do not answer in time.

A worker runs `calculator_worker.py` as a program. It starts when it is first needed, and is reused.
"""

import asyncio
import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from classroom_rl.errors import EngineFailure
from classroom_rl.rollout.tools.calculator_worker import LONGEST
from classroom_rl.rollout.tools.tool import Tool, Toolbox, ToolFailure, ToolLimits
from classroom_rl.system.worker_pool import WorkerPool

logger = logging.getLogger(__name__)


_PROGRAM = Path(__file__).with_name("calculator_worker.py")


class Calculator:
    """Computes expressions in `workers` processes; further expressions wait for a free one.

    Args:
        timeout_s: how many seconds a worker may compute before it is killed.

    Attributes:
        given_up: the number of expressions on which a worker died or was killed.
    """

    def __init__(self, timeout_s: float = 2.0, workers: int = min(2, os.cpu_count() or 1)):
        self.given_up = 0
        self._pool: WorkerPool[str, dict[str, str]] = WorkerPool(
            [_Worker(timeout_s) for _ in range(workers)], "calculator"
        )
        atexit.register(self.shutdown)

    async def compute(self, expression: str) -> str:
        """The value of an expression, as text.

        Raises:
            ToolFailure: if it is no expression, or its numbers are too large; the message says what is wrong.
            TimeoutError: if it took too long, or the worker died.
            EngineFailure: if no worker can be started.
        """
        if len(expression) > LONGEST:  # the worker checks this too, but must not be sent a huge text
            raise ToolFailure(f"it has {len(expression)} characters, and {LONGEST} are the most")
        return await asyncio.get_running_loop().run_in_executor(self._pool.threads, self._ask, expression)

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return self._pool.pids

    def shutdown(self) -> None:
        """End all workers."""
        self._pool.shutdown()
        atexit.unregister(self.shutdown)

    def _ask(self, expression: str) -> str:
        answer = self._pool.ask(expression)
        if answer is None:
            self.given_up += 1
            logger.warning("the calculator gave up on %.200r (%d so far)", expression, self.given_up)
            raise TimeoutError("the calculation took too long")
        if "mistake" in answer:
            raise ToolFailure(answer["mistake"])
        return answer["value"]


class _Worker:
    """One worker process. `ask` starts it if it does not run."""

    def __init__(self, timeout_s: float):
        self.process: subprocess.Popen[bytes] | None = None
        self._timeout_s = timeout_s

    def ask(self, expression: str) -> dict[str, str] | None:
        """The worker's answer; None if it died, or was killed after the time-out."""
        process = self.process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None and process.stdout is not None  # `_start` makes both of them pipes
        try:
            process.stdin.write(json.dumps(expression).encode() + b"\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], self._timeout_s)[0]:
                answer: dict[str, str] = json.loads(process.stdout.readline())
                return answer
        except (OSError, ValueError):  # the process died; the caller logs it
            pass
        self.kill()
        return None

    def kill(self) -> None:
        """Kill the process, if it runs."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None and process.stdout is not None  # `_start` makes both of them pipes
            process.stdin.close()
            process.stdout.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self.kill()
        command = [sys.executable, "-I", "-S", str(_PROGRAM)]
        try:
            self.process = process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, bufsize=0
            )
        except OSError as error:
            raise EngineFailure(f"The calculator's process cannot be started: {error}") from error
        return process


_shared: Calculator | None = None
_lock = threading.Lock()


_DOC = """Computes an arithmetic expression exactly, such as (3 + 4) * 2 / 7 or sqrt(2)**3. It knows + - * / // % **,
sqrt, abs, round, floor, ceil, min, max, sum, gcd, lcm, factorial, comb, exp, log, ln, log10, sin, cos, tan, asin,
acos, atan, radians, degrees, pi and e. % is the remainder: 20 % of 50 is 0.2 * 50.

Args:
    expression: the expression, without variables and without an equals sign
"""


async def _calculate(expression: str) -> str:
    global _shared
    with _lock:
        _shared = _shared or Calculator()
    return await _shared.compute(expression)


_calculate.__doc__ = _DOC  # the model reads it, and `python -OO` would remove it
calculator = Tool(_calculate, "calculator")


BUILT_IN_TOOLS = {tool.name: tool for tool in (calculator,)}


def built_in_toolbox(names: Sequence[str], limits: ToolLimits) -> Toolbox:
    """The built-in tools (`BUILT_IN_TOOLS`) with these names, as a toolbox."""
    return Toolbox([BUILT_IN_TOOLS[name] for name in names], limits)
