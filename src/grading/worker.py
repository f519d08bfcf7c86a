"""Compares answers with math-verify, in a process of its own: what a model writes may keep a parser or a computer
algebra system busy for ever, or eat all memory, and then this process is killed.

Nothing that a model wrote is evaluated as code. Sympy's `parse_expr` is Python's `eval`. Math-verify hands it plain
expressions, so only its LaTeX side is used, whose grammar (latex2sympy2_extended) builds expressions node by node; but
that makes its numbers with `sympy.Number(text)`, which comes to `parse_expr`, too. So in this process `parse_expr` is
replaced by a function that reads numbers and nothing else. The process can also write no file, start no program, reach
no network, and use so much memory and time and no more.
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

from src.grading.forms import Pair

READY = b"ready"
_DECIMAL = re.compile(r"\d+(\.\d*)?([eE][+-]?\d{1,3})?|\.\d+([eE][+-]?\d{1,3})?", re.ASCII)
_MEMORY = 2 * 2**30
_FORBIDDEN = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"})


def serve(pipe: Connection, timeout_s: float) -> None:
    """Answer questions until the other end closes: a list of pairs of LaTeX expressions comes, whether one of them is
    equal goes back, both as JSON. `timeout_s` of processor time on one question end the process, in case the one who
    asked is no longer there to do so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that ends this one
    logging.disable()
    _replace_eval()
    _are_equal("1", "1")  # imports what is imported late
    _give_up_rights()
    pipe.send_bytes(READY)
    while True:
        try:
            question: list[Pair] = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        _limit_processor_time(timeout_s)
        pipe.send_bytes(json.dumps(any(_are_equal(given, wanted) for given, wanted in question)).encode())


def _are_equal(given: str, wanted: str) -> bool:
    """Whether math-verify takes the two LaTeX expressions for equal; not if it cannot read one of them."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # Units are dealt with before: math-verify takes the t of "5t" for one.
    normalisation = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all")
    latex_only = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalisation)]
    parsed = [
        parse(rf"\boxed{{{text}}}", latex_only, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (wanted, given)
    ]
    return verify(*parsed, allow_set_relation_comp=True, timeout_seconds=None)


def _replace_eval() -> None:
    import sympy.physics.units  # noqa: F401  imported late otherwise, by `simplify`, and then needs the real one
    from sympy.parsing import sympy_parser

    sympy_parser.parse_expr = _read_number


def _read_number(text: str, **_: Any) -> Any:
    """In place of `parse_expr`: the number that the text is.

    Raises:
        SyntaxError: if it is none; sympy takes this for an expression that it cannot read.
    """
    from sympy import Float, Integer

    if not _DECIMAL.fullmatch(text):
        raise SyntaxError(f"no number: {text!r}")
    return Integer(int(text)) if text.isdigit() else Float(text)


def _give_up_rights() -> None:
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_refuse)


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    """Stop what comparing two expressions never needs."""
    if event in _FORBIDDEN:
        raise PermissionError(f"{event} in a process that only compares answers")


def _limit_processor_time(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
