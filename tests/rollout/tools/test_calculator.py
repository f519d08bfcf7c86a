"""The calculator's processes: one that hangs or dies is replaced, and none outlives its program."""

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
from classroom_rl.rollout.tools.calculator import Calculator
from classroom_rl.rollout.tools.calculator import calculator as tool
from classroom_rl.rollout.tools.calculator_worker import FUNCTIONS
from classroom_rl.rollout.tools.tool import ToolFailure
from tests.rollout.tools.test_calculator_worker import RIGHT, WRONG


@pytest.fixture(scope="module")
def calculator() -> Iterator[Calculator]:
    calculator = Calculator(timeout_s=60, workers=1)
    yield calculator
    calculator.shutdown()


def test_the_worker_gives_the_same_answers_and_stays(calculator: Calculator) -> None:
    async def all_of_them() -> list[object]:
        coroutines = (calculator.compute(expression) for expression in [*RIGHT, *WRONG])
        return await asyncio.gather(*coroutines, return_exceptions=True)

    answers = asyncio.run(all_of_them())
    (pid,) = calculator.pids
    assert answers[: len(RIGHT)] == list(RIGHT.values())
    for words, answer in zip(WRONG.values(), answers[len(RIGHT) :], strict=True):
        assert isinstance(answer, ToolFailure) and re.search(words, str(answer))
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
    assert all(isinstance(answer, str | ToolFailure) for answer in answers) and calculator.given_up == 0
    assert {type(answer) for answer in answers} == {str, ToolFailure}


# The process ---------------------------------------------------------------------------------------------------------


def stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.parametrize(("sent", "given_up"), [(signal.SIGSTOP, 1), (signal.SIGKILL, 0)], ids=["hangs", "died"])
def test_a_worker_that_hangs_or_died_is_replaced(sent: signal.Signals, given_up: int) -> None:
    calculator = Calculator(timeout_s=60, workers=1)
    (worker,) = calculator._pool._workers
    try:
        assert asyncio.run(calculator.compute("1+1")) == "2"
        (pid,) = calculator.pids
        os.kill(pid, sent)
        if sent == signal.SIGSTOP:  # as one that computes for ever
            worker._timeout_s = 0.05
            with pytest.raises(TimeoutError):
                asyncio.run(calculator.compute("1+1"))
            worker._timeout_s = 60
        else:
            worker.process.wait()
        assert stopped(pid) and calculator.given_up == given_up
        assert asyncio.run(calculator.compute("1+2")) == "3" and calculator.pids != [pid]
    finally:
        calculator.shutdown()
    assert calculator.pids == []


def test_a_worker_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, signal; from classroom_rl.rollout.tools.calculator import Calculator, calculator; "
        "c = Calculator(); "
        "asyncio.run(c.compute('1')); print(*c.pids, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 1
    deadline = time.monotonic() + 60
    while not stopped(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stopped(pids[0])


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_optimized_python_computes_and_describes_the_same(flag: str) -> None:
    program = (
        "import asyncio, json; from classroom_rl.rollout.tools.calculator import calculator\n"
        "print(json.dumps([calculator.schema, asyncio.run(calculator(expression='1/3 + 2 / 3'))]))"
    )
    result = subprocess.run(
        [sys.executable, flag, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [tool.schema, "1"]
    assert tool.schema["function"]["parameters"]["properties"]["expression"]["description"]
