"""The output of a program that another one runs."""

import os
import subprocess
import sys

import pytest

from classroom_rl.system.terminal import Waiting
from tests.conftest import ROOT

ECHOING = """
import sys
from pathlib import Path
from classroom_rl.system.processes import Child, Signals
program, log = sys.argv[1:]
with Signals() as signals, Child("it", [sys.executable, program], signals, Path(log), echo=True) as child:
    child.wait()
"""
ECHOED = """
import sys
print(sys.stdout.isatty())
print("10 %\\r50 %\\r100 %")
print("caf\\u00e9")
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_program_sees_a_terminal_if_there_is_one_and_its_log_has_whole_lines(tmp_path, terminal):
    read_end, write_end = os.openpty() if terminal else os.pipe()
    (tmp_path / "program.py").write_text(ECHOED, encoding="utf-8")
    command = [sys.executable, "-c", ECHOING, str(tmp_path / "program.py"), str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    subprocess.run(command, stdout=write_end, env=environment, check=True, timeout=300)
    output = os.read(read_end, 4096).decode("utf-8").replace("\r\n", "\n")
    os.close(read_end)
    os.close(write_end)
    assert output == f"{terminal}\n10 %\r50 %\r100 %\ncafé\n"
    assert (tmp_path / "log").read_text(encoding="utf-8") == f"{terminal}\n100 %\ncafé\n"


def test_a_wait_is_one_line_that_is_updated_on_a_terminal_and_gone_afterwards(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    waiting = Waiting("the server loads", 60.0)
    waiting.show()
    waiting.done()
    assert capsys.readouterr().out == "\rthe server loads: 0 s (at most 60 s)\r\033[K"


def test_elsewhere_a_wait_shows_a_line_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("classroom_rl.system.terminal.time.monotonic", lambda: now[0])
    waiting = Waiting("the server loads", 60.0)
    for now[0] in range(1, 40):
        waiting.show()
    waiting.done()
    assert capsys.readouterr().out.splitlines() == [
        "the server loads: 16 s (at most 60 s)",
        "the server loads: 32 s (at most 60 s)",
    ]
