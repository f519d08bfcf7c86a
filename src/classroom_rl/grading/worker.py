"""Compares answers with math-verify in a separate process. A model's text can keep a parser or a computer algebra
system busy forever, or use up all memory; then this process is killed.

No text of a model is evaluated as code. Sympy's `parse_expr` calls Python's `eval`. math-verify passes plain
expressions to it, so only its LaTeX parser is used (latex2sympy2_extended), which builds expressions node by node. But
that parser creates numbers with `sympy.Number(text)`, which also calls `parse_expr`. So this process replaces
`parse_expr` with a function that parses only numbers. The process also cannot write files, start programs or open
connections, and its memory and CPU time are limited.
"""

import json
import logging
import math
import os
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from classroom_rl.grading.forms import Pair

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
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
