"""Grading of boxed answers: which are equal, which are not, and what happens to answers made to keep the program
busy."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.config.load import ROOT
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.errors import EngineFailure
from classroom_rl.grading import checker as answers
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.grading.forms import LONGEST
from classroom_rl.rollout.engine import Sampling

SUBJECTS = yaml.safe_load((Path(__file__).parent / "answer_pairs.yaml").read_text(encoding="utf-8"))
PAIRS = [
    pytest.param(given, wanted, verdict == "right", id=f"{given} | {wanted}")
    for groups in SUBJECTS.values()
    for verdict, pairs in groups.items()
    for given, wanted in pairs
]


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    checker = AnswerChecker(timeout_s=60.0, workers=1)
    yield checker
    checker.shutdown()


@pytest.fixture(scope="module")
def impatient() -> Iterator[AnswerChecker]:
    checker = AnswerChecker(timeout_s=0.5, workers=1)
    yield checker
    checker.shutdown()


@pytest.fixture
def checkers() -> Iterator[Callable[..., AnswerChecker]]:
    """Makes checkers of a test's own, with one patient worker unless it says otherwise."""
    started: list[AnswerChecker] = []

    def make(timeout_s: float = 60.0, workers: int = 1) -> AnswerChecker:
        started.append(AnswerChecker(timeout_s, workers))
        return started[-1]

    yield make
    for checker in started:
        checker.shutdown()


def is_correct(checker: AnswerChecker, boxed: str, answer: str) -> bool:
    return asyncio.run(checker.is_correct(rf"Hence \boxed{{{boxed}}}", answer))


# What is equal -------------------------------------------------------------------------------------------------------


def test_an_answer_that_is_not_boxed_is_wrong(checker):
    assert not asyncio.run(checker.is_correct("The answer is 4", "4"))


@pytest.mark.parametrize(("given", "wanted", "right"), PAIRS)
def test_an_answer_against_the_reference(checker, given, wanted, right):
    assert is_correct(checker, given, wanted) is right


def test_an_answer_equals_itself_however_it_is_dressed(checker):
    references = {pair.values[1] for pair in PAIRS if pair.values[1]}
    for reference in references:
        for dressed in (reference, f"${reference}$", rf"\( {reference} \)", f"{reference}."):
            assert is_correct(checker, dressed, reference), (dressed, reference)


@settings(max_examples=50)
@given(st.text(st.sampled_from(r"\{}()[]^_,;=<>+-*/!|%$0123456789xyei ")), st.sampled_from(["3", r"\{1,2\}", "x+1"]))
def test_no_formula_makes_a_worker_fail(checker, formula, answer):
    given_up = checker.given_up
    assert is_correct(checker, formula, answer) in (True, False)
    assert checker.given_up == given_up


# What would hang a parser, or run as a program -----------------------------------------------------------------------

HANGS = {
    "a tower of powers": "9^{9^{9^{9}}}",
    "a power of a power": "(10^{10})^{10^{10}}",
    "a factorial": "99999999!",
    "factorials of factorials": "((((9!)!)!)!)!",
    "a long sum": r"\sum_{k=1}^{10^9} \sin(k^k)",
    "a big binomial": r"\binom{10^9}{10^8}",
    "a polynomial": "(x+y+z+w+1)^{200}(x-1)^{300}",
    "deep braces": "{" * 450 + "1" + "}" * 450,
}
HARMLESS = {
    "deep roots": r"\sqrt{" * 140 + "2" + "}" * 140,
    "deep parentheses": "(" * LONGEST + "1" + ")" * LONGEST,
    "a long sum": "1+" * 50_000 + "1",
    "a long number": "7" * 100_000,
    "boxes that never close": r"\boxed{" * 15_000,
    "boxes in boxes": r"\boxed{" * 15_000 + "1" + "}" * 15_000,
    "a null": "\x00",
    "half a character": "\ud800",
    "digits of another script": "٣",
    "too large a power of ten": "1e999",
    "a matrix that fills the memory": r"\operatorname{zeros}(100000,100000)",
}


@pytest.mark.parametrize("name", HANGS)
def test_what_takes_too_long_is_killed_and_counts_as_wrong(impatient, caplog, name):
    impatient.given_up = 0
    with caplog.at_level(logging.WARNING):
        assert not is_correct(impatient, HANGS[name], "x+3")
    assert impatient.given_up == 1 and "it counts as wrong (1 so far)" in caplog.text
    assert impatient.pids == []


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_dangerous_is_wrong_and_quickly_so(checker, name):
    assert not is_correct(checker, HARMLESS[name], "x+3")
    assert checker.given_up == 0, "it took a minute"


def test_after_a_hang_answers_are_compared_again(checkers):
    checker = checkers(timeout_s=1.0)
    assert not is_correct(checker, HANGS["a tower of powers"], "x+3")
    assert checker.given_up == 1 and checker.pids == []
    checker._pool._workers[0]._timeout_s = 600.0
    assert is_correct(checker, "x+1", "1+x") and len(checker.pids) == 1


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('touch {}')",
        r"\text{{__import__('os').system('touch {}')}}",
        r"x_{{__import__('os').system('touch {}')}}",
        r"\operatorname{{__import__('os').system('touch {}')}}(1)",
        "exec(\"open('{}','w')\")",
        "1 if open('{}','w') else 2",
    ],
)
def test_code_is_not_run(checker, tmp_path, code):
    mark = tmp_path / "mark"
    assert not is_correct(checker, code.format(mark), "3")
    assert not is_correct(checker, "3", code.format(mark))
    assert not mark.exists()


def ask_for_rights(pipe, folder: str) -> None:
    """What a worker may still do after `_drop_privileges`, one letter for each."""
    import subprocess

    import sympy

    from classroom_rl.grading.checker import _drop_privileges, _replace_eval

    _replace_eval()
    _drop_privileges()
    allowed = ""
    for letter, attempt in {
        "w": lambda: (Path(folder) / "mark").write_text("x"),
        "p": lambda: subprocess.run(["true"], check=True),
        "s": lambda: os.system("true"),
        "f": os.fork,
        "m": lambda: bytearray(3 * 2**30),
        "e": lambda: sympy.sympify("__import__('os').getpid()"),
        "n": lambda: sympy.Number("12"),
    }.items():
        try:
            attempt()
            allowed += letter
        except (OSError, MemoryError, sympy.SympifyError):
            continue
    pipe.send_bytes((allowed + str(len(os.environ))).encode())


def test_a_worker_has_no_rights_that_it_does_not_need(tmp_path):
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=ask_for_rights, args=(theirs, str(tmp_path)), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60) and ours.recv_bytes() == b"n0", "numbers can be read, and nothing else be done"
    process.join(60)


# The workers ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_compared_by_all_workers_at_once(checkers):
    checker = checkers(workers=2)

    async def grade() -> list[bool]:
        solutions = (rf"\boxed{{(x+{i})(x-{i})}}" for i in range(12))
        return await asyncio.gather(*(checker.is_correct(solution, "x^2-9") for solution in solutions))

    assert asyncio.run(grade()) == [i == 3 for i in range(12)]
    assert len(checker.pids) == 2 and checker.given_up == 0


def test_what_texts_decide_needs_no_worker(checkers):
    checker = checkers()
    assert is_correct(checker, "0.5", r"\frac{1}{2}") and not is_correct(checker, "0.5", "0.6")
    assert checker.pids == []


def test_a_worker_that_was_killed_meanwhile_is_replaced_and_nobody_suffers(checkers):
    checker = checkers()
    assert is_correct(checker, "x+1", "1+x")
    killed = psutil.Process(checker.pids[0])
    killed.kill()
    killed.wait(120)
    assert is_correct(checker, "x+1", "1+x") and checker.given_up == 0
    assert checker.pids != [killed.pid]


def test_shutdown_leaves_no_process_and_no_verdict_even_if_a_worker_is_busy(checkers):
    checker = checkers(timeout_s=600.0)
    assert is_correct(checker, "x+1", "1+x")
    pids = checker.pids

    async def interrupted() -> bool:
        busy = asyncio.create_task(checker.is_correct(rf"\boxed{{{HANGS['a long sum']}}}", "1"))
        await asyncio.sleep(0.5)
        checker.shutdown()
        return await asyncio.wait_for(busy, 120)

    with pytest.raises(EngineFailure, match="shuts down"):  # no verdict, rather than a wrong one in the journal
        asyncio.run(interrupted())
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)


KILLED = """
import asyncio, json, os, signal, sys
from classroom_rl.grading.checker import AnswerChecker

if __name__ == "__main__":
    checker = AnswerChecker(timeout_s=1.0, workers=1)
    worker = checker._pool._workers[0]
    worker._start()  # with a second of processor time, however long that takes
    worker._timeout_s = 600.0
    asyncio.run(checker.is_correct("\\\\boxed{x+1}", "1+x"))
    print(checker.pids[0], flush=True)
    checker._pool._workers[0]._pipe.send_bytes(json.dumps([(sys.argv[1], "1")]).encode())
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("answer", ["2", HANGS["a long sum"]], ids=["idle", "busy"])
def test_a_worker_whose_program_was_killed_ends_by_itself(tmp_path, answer):
    """An idle one sees its pipe close; a busy one has used up its processor time soon."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, script, answer], env=environment, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert process.returncode == -signal.SIGKILL
    worker = int(process.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_workers_end_with_the_roles():
    roles = Roles(None, Sampling(1.0), None, Sampling(1.0), None)
    assert is_correct(roles.answers, "x+1", "1+x")
    pids = roles.answers.pids
    roles.shutdown()
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_cannot_start_is_an_error_and_no_verdict(checkers, monkeypatch):
    monkeypatch.setattr(answers, "serve", os._exit)
    with pytest.raises(EngineFailure, match="was not ready"):
        is_correct(checkers(), "x+1", "1+x")
