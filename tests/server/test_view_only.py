"""Tests of the page on a running server, and of `--view`, which shows a run without a model."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from classroom_rl.config.load import ROOT
from classroom_rl.rollout.problem import Problem
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.viewer.reader import RunReader
from tests.conftest import free_port
from tests.support.scripted_room import Room
from tests.support.viewer_run import make_run


def test_the_page_shows_the_server_s_own_run(http: TestClient, room: Room) -> None:
    body = {"problems": ["fractions"] * 2, "answers": ["1/2"] * 2, "request_id": "r", "seed": 1, "step": 0}
    http.post("/sample_conversations", json=body)
    run, pulse = http.get("/api/run").json(), http.get("/api/pulse").json()
    assert run["live"] and run["chat"] == {"on": True, "why": ""} and pulse["policy"] == "initial weights v0"
    assert (pulse["playing"], pulse["played"]) == (0, 2)
    page = http.get("/api/conversations", params={"where": "now"}).json()
    conversation = http.get("/api/conversation", params={"where": "now", "id": page["columns"]["id"][0]}).json()
    assert conversation["problem"] == "fractions" and conversation["turns"][0]["parts"] == [["said", "Say hello."]]


def test_a_conversation_that_is_being_played_shows_its_lesson(http: TestClient, room: Room, tmp_path: Path) -> None:
    body = {"problems": ["one", "two", "one"], "answers": ["1", "2", "1"], "request_id": "r", "seed": 1, "step": 4}
    http.post("/sample_conversations", json=body)
    lines = (room.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "half").mkdir()
    unfinished = [line for line in lines if not line.startswith('{"event": "conversation"')]
    (tmp_path / "half" / "journal.jsonl").write_text("".join(unfinished), encoding="utf-8")
    rows = RunReader(tmp_path / "half").playing()
    assert len(unfinished) < len(lines) and [row.state for row in rows] == ["PLAYING"] * 3
    assert [row.title for row in sorted(rows, key=lambda row: row.index)] == ["one", "two", "one"]
    assert {row.problem_id for row in rows} == {Problem.of("one", "1").id, Problem.of("two", "2").id}


# --view ----------------------------------------------------------------------------------------------------------


def view(*arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "vllm_server.py", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_is_shown_without_a_model(tmp_path: Path) -> None:
    run, port = make_run(tmp_path / "run"), free_port()
    paths_before = sorted(path for path in run.rglob("*"))
    process = view("--view", str(run), f"generation.server_port={port}")
    try:
        assert f"http://127.0.0.1:{port}/ shows the run" in process.stdout.readline()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/run", timeout=60) as answer:
            assert b'"steps":[0,1,2]' in answer.read()
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
    assert sorted(path for path in run.rglob("*")) == paths_before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--view"], "--view needs a run folder: python vllm_server.py --view runs/quickstart"),
        (
            ["--view", "{empty}", "generation.server_port={free}"],
            "there is nothing to show; a run folder holds one of metrics.jsonl",
        ),
        (["--view={run}", "generation.server_host=0.0.0.0"], "other machines can reach"),
        (["--view", "{run}", "generation.server_prot=1"], "Did you mean generation.server_port?"),
        (["--view", "{run}", "generation.server_port={taken}"], f"Process {os.getpid()} listens there"),
    ],
)
def test_what_cannot_be_shown_ends_with_a_message(tmp_path: Path, arguments: list[str], said: str) -> None:
    run = make_run(tmp_path / "run", steps=1)
    (tmp_path / "empty").mkdir()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        substitutions = {"run": run, "empty": tmp_path / "empty", "taken": holder.getsockname()[1]}
        substitutions["free"] = free_port()
        process = view(*(argument.format(**substitutions) for argument in arguments), **{TOKEN_VARIABLE: ""})
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 2 and said in errors and "Traceback" not in errors


def test_the_viewer_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, pathlib\n"
        "from classroom_rl.server.view_only import create_viewer\n"
        "create_viewer(pathlib.Path('tests/support/old_run'), None)\n"
        "assert not {'torch', 'vllm', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)
