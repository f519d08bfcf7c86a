"""The calculator: exact arithmetic, nothing else, in a process that can be killed."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.rollout.tools import calculator_worker
from classroom_rl.rollout.tools.calculator import Calculator
from classroom_rl.rollout.tools.calculator import calculator as tool
from classroom_rl.rollout.tools.calculator_worker import FUNCTIONS, Mistake, compute
from classroom_rl.rollout.tools.tool import ToolFailure

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


@pytest.fixture(scope="module")
def calculator() -> Iterator[Calculator]:
    found = Calculator(timeout_s=60, workers=1)
    yield found
    found.shutdown()


@pytest.mark.parametrize("expression", RIGHT)
def test_it_computes(expression: str) -> None:
    assert compute(expression) == RIGHT[expression]


@pytest.mark.parametrize("expression", WRONG, ids=lambda text: text[:30])
def test_everything_else_is_a_mistake_in_words(expression: str) -> None:
    with pytest.raises(Mistake, match=WRONG[expression]):
        compute(expression)


def test_the_worker_gives_the_same_answers_and_stays(calculator: Calculator) -> None:
    async def all_of_them() -> list[object]:
        asked = (calculator.compute(each) for each in [*RIGHT, *WRONG])
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(all_of_them())
    (pid,) = calculator.pids
    assert answers[: len(RIGHT)] == list(RIGHT.values())
    for said, found in zip(WRONG.values(), answers[len(RIGHT) :], strict=True):
        assert isinstance(found, ToolFailure) and re.search(said, str(found))
    assert calculator.given_up == 0 and calculator.pids == [pid]


def random_expression(rng: random.Random, depth: int = 0) -> str:
    if depth > 6 or rng.random() < 0.3:
        return rng.choice(
            ["1", "0", "2.5", "10**3", "1e308", "9" * rng.randrange(1, 400), "pi", "x", "'a'", "()", "[]"]
        )
    inner = [random_expression(rng, depth + 1) for _ in range(2)]
    form = rng.choice("({}) + ({})|({}) ** ({})|({}) / ({})|({}) % ({})|({})({})|({}).{}|({})[{}]|{} {}".split("|"))
    name = rng.choice([*FUNCTIONS, "eval", "exec", "__import__"])
    return rng.choice([form.format(*inner), f"{name}({inner[0]}, {inner[1]})", f"{name}({inner[0]})", f"-{inner[0]}"])


def test_random_expressions_have_an_answer_or_a_mistake(calculator: Calculator) -> None:
    rng = random.Random(5)
    texts = [random_expression(rng) for _ in range(1500)]
    texts += ["".join(rng.choices("0123456789+-*/().,eE^%[]{}'\"_ abx\\\n", k=rng.randrange(80))) for _ in range(1500)]

    async def all_of_them() -> list[object]:
        return await asyncio.gather(*map(calculator.compute, texts), return_exceptions=True)

    answers = asyncio.run(all_of_them())
    assert all(isinstance(each, str | ToolFailure) for each in answers) and calculator.given_up == 0
    assert {type(each) for each in answers} == {str, ToolFailure}


# The process ---------------------------------------------------------------------------------------------------------


def stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_worker_that_does_not_answer_is_killed_and_replaced() -> None:
    calculator = Calculator(timeout_s=60, workers=1)
    try:
        assert asyncio.run(calculator.compute("1+1")) == "2"
        (pid,) = calculator.pids
        os.kill(pid, signal.SIGSTOP)  # as one that computes for ever
        calculator._pool._workers[0]._timeout_s = 0.05
        with pytest.raises(TimeoutError):
            asyncio.run(calculator.compute("1+1"))
        assert stopped(pid) and calculator.given_up == 1
        calculator._pool._workers[0]._timeout_s = 60
        assert asyncio.run(calculator.compute("1+2")) == "3" and calculator.pids != [pid]
    finally:
        calculator.shutdown()
    assert calculator.pids == []


def test_a_worker_that_died_is_replaced() -> None:
    calculator = Calculator(timeout_s=60, workers=1)
    try:
        asyncio.run(calculator.compute("1"))
        (pid,) = calculator.pids
        os.kill(pid, signal.SIGKILL)
        calculator._pool._workers[0].process.wait()
        assert asyncio.run(calculator.compute("1+2")) == "3"
    finally:
        calculator.shutdown()


def test_a_worker_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, signal; from classroom_rl.rollout.tools.calculator import Calculator, calculator; "
        "c = Calculator(); "
        "asyncio.run(c.compute('1')); print(*c.pids, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    pids = [int(each) for each in done.stdout.split()]
    assert len(pids) == 1
    deadline = time.monotonic() + 60
    while not stopped(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stopped(pids[0])


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


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_optimized_python_computes_and_describes_the_same(flag: str) -> None:
    program = (
        "import asyncio, json; from classroom_rl.rollout.tools.calculator import calculator\n"
        "print(json.dumps([calculator.schema, asyncio.run(calculator(expression='1/3 + 2 / 3'))]))"
    )
    done = subprocess.run([sys.executable, flag, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [tool.schema, "1"]
    assert tool.schema["function"]["parameters"]["properties"]["expression"]["description"]
