"""Exact arithmetic, and nothing else: what is no arithmetic is a mistake in words."""

import subprocess
import sys
from pathlib import Path

import pytest

from classroom_rl.rollout.tools import calculator_worker
from classroom_rl.rollout.tools.calculator_worker import Mistake, compute

RIGHT = {
    "2 + 3 * 4": "14",
    "(2 + 3) * 4 / 5**2": "0.8",
    "2^10 + 1": "1025",
    "-2**2": "-4",
    "1/3 + 1/3 + 1/3": "1",
    "0.1 + 0.2": "0.3",
    "2/3": "0.666666666667 (exactly 2/3)",
    "7 // 2 + 7 % 2": "4",
    "12 × 3 ÷ 4 − 1": "8",
    "1,234,567 * 2": "2469134",
    "max(1, 2,3)": "3",
    "sqrt(9/4)": "1.5",
    "sqrt(2)": "1.41421356237",
    "4**(1/2)": "2",
    "2**-2": "0.25",
    "round(2.5)": "3",
    "round(-2.345, 2)": "-2.35",
    "floor(-1.5) + ceil(1.2)": "0",
    "factorial(5)": "120",
    "comb(5, 2)": "10",
    "gcd(12, 18) + lcm(4, 6)": "18",
    "log(8, 2)": "3",
    "ln(e)": "1",
    "log10(1000)": "3",
    "sin(pi)": "0",
    "degrees(pi)": "180",
    "2**100": "1267650600228229401496703205376",
    "1**(10**999)": "1",
    "abs(-3)": "3",
}

WRONG = {
    "9**9**9": "more than 1000 digits",
    "2**(10**9)": "more than 1000 digits",
    "10**1000 * 10": "more than 1000 digits",
    "(1/3)**99999": "more than 1000 digits",
    "factorial(10**6)": "from 0 to 450",
    "factorial(2.5)": "whole numbers",
    "comb(10000, 5000)": "more than 1000 digits",
    "e**1000": "too large",
    "1e999": "no finite",
    "1/0": "divides by zero",
    "5 % 0": "divides by zero",
    "0**-1": "divides by zero",
    "(-8)**(1/3)": "negative number",
    "sqrt(-1)": "negative",
    "log(0)": "logarithm",
    "": "empty",
    "   ": "empty",
    "x + 1": "names x",
    "2 = 2": "one side",
    "3 apples": "no arithmetic expression",
    "2 +": "no arithmetic expression",
    "().__class__.__bases__[0].__subclasses__()": "something else",
    "__import__('os').system('ls')": "something else",
    "open('/etc/passwd')": "names open",
    "sqrt.__globals__": "something else",
    "(lambda: 1)()": "something else",
    "[1] * 10": "something else",
    "'a' * 3": "something else",
    "True + 1": "something else",
    "1j": "something else",
    "1 if 2 else 3": "something else",
    "1 < 2": "something else",
    "max(*[1, 2])": "something else",
    "round(1, ndigits=2)": "one side",
    "(x := 3)": "one side",
    "max()": "takes 1 to 100 numbers",
    "sqrt(1, 2)": "takes 1 numbers",
    "(" * 500 + "1" + ")" * 499: "no arithmetic",
    "(" * 1_000_000: "characters",
    "-" * 990 + "1 2": ".",
    "\x00": ".",
    "1\n2": "no arithmetic expression",
    "import os": "no arithmetic expression",
}


@pytest.mark.parametrize("expression", RIGHT)
def test_it_computes(expression: str) -> None:
    assert compute(expression) == RIGHT[expression]


@pytest.mark.parametrize("expression", WRONG, ids=lambda text: text[:30])
def test_everything_else_is_a_mistake_in_words(expression: str) -> None:
    with pytest.raises(Mistake, match=WRONG[expression]):
        compute(expression)


def test_the_worker_can_do_nothing_but_compute() -> None:
    """Its audit hook, with rights given up as in the program: no file, no process, no connection."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(calculator_worker.__file__).parent)!r}); "
        "import calculator_worker as w, os, socket; w._give_up_rights(); allowed = []\n"
        "for what in (lambda: open('/etc/passwd'), lambda: os.system('true'), lambda: os.fork(), "
        "lambda: socket.socket(), lambda: eval('1'), lambda: exec('1')):\n"
        "    try: what(); allowed.append(1)\n"
        "    except PermissionError: pass\n"
        "os._exit(len(allowed))"
    )
    assert subprocess.run([sys.executable, "-I", "-c", program], timeout=300).returncode == 0
