"""Small versions of what the suite does to whole trainings, with a server and a provider, and how it tells right from
wrong."""

import sqlite3
import sys
import threading
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import pytest

from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.processes import Child, Signals
from tests.chaos import __main__ as suite
from tests.chaos.cases import Case, LeftOut, Result, Results
from tests.chaos.damage import fill, small_disk
from tests.chaos.programs import KEYS, files_with_keys, overrides_of, start_server, wait_for
from tests.chaos.trainings import keys_in_environment, ledgers, provider_overrides, spent_wrongly
from tests.chaos.twice import refused
from tests.conftest import free_port
from tests.support import paid_api, scripted_server
from tests.support.kills import kill, outcome_of


def request(lessons: list[str]) -> SampleRequest:
    return SampleRequest(
        problems=[lesson for lesson in lessons[:4] for _ in range(4)],
        answers=[""] * 16,
        request_id="chaos-step000000-rank0of1",
        seed=1,
        step=0,
        supervised=True,
    )


def test_a_batch_is_played_and_paid_once_whatever_is_killed(world, lessons, tmp_path):
    """Provider, server and an engine are killed one after the other while a client waits for its batch."""
    api_port, folder = free_port(), tmp_path / "run"
    overrides, port = overrides_of(folder, world, *provider_overrides(tmp_path, api_port))
    overrides[overrides.index("quickstart")] = "quickstart_supervised"
    record, pace = tmp_path / "sent.jsonl", {scripted_server.MESSAGE_S: "0.3"}
    responses: list = []
    with keys_in_environment(), Signals() as signals:
        client = ClassroomClient(f"http://127.0.0.1:{port}")

        def provide() -> Child:
            return Child("the provider", paid_api.command(api_port, record, 0.3), signals, tmp_path / "provider.log")

        def serve() -> Child:
            return start_server(overrides, folder / "server.log", signals, pace)

        def strike(pid: int, dying: Child) -> None:
            sent_before = paid_api.sent(record)
            wait_for(lambda: paid_api.sent(record) > sent_before, "the next answer")
            kill(pid)
            wait_for(lambda: dying.poll() is not None, "the end of what was killed")
            dying.stop()
            assert client_thread.is_alive(), "the batch was there before"

        provider, server = provide(), serve()
        try:
            client.wait_until_up(120, alive=lambda: server.poll() is None)
            client_thread = threading.Thread(target=lambda: responses.append(client.sample(request(lessons))))
            client_thread.start()
            strike(provider.pid, provider)
            provider = provide()
            strike(server.pid, server)
            server = serve()
            health = client.wait_until_up(120, alive=lambda: server.poll() is None)
            strike(health.roles["teacher"].pids[0], server)
            server = serve()
            client_thread.join(120)
        finally:
            server.stop()
            provider.stop()
    assert responses and len(responses[0].conversations) == 16
    (folder / "metrics.jsonl").write_text("")
    outcome = outcome_of(folder)
    assert (outcome.played_twice, outcome.judged_twice, outcome.lost) == (0, 0, 0)
    assert spent_wrongly(SimpleNamespace(folder=folder, record=record)) == []
    assert {role for role, _ in ledgers(folder)["answered"]} == {"judge", "supervisor"}
    assert files_with_keys(tmp_path) == []


def test_a_second_server_on_a_run_folder_is_refused(world, tmp_path):
    overrides, _ = overrides_of(tmp_path / "run", world)
    with Signals() as signals, start_server(overrides, tmp_path / "server.log", signals) as server:
        lock = tmp_path / "run" / "vllm_server.lock"
        wait_for(lambda: lock.exists() and lock.read_text() == str(server.pid), "the lock")
        command = scripted_server.command([*overrides, f"generation.server_port={free_port()}"])
        assert refused(command, "as vllm_server already") is None
        assert "ended with status 3" in refused([sys.executable, "-c", "exit(3)"], "")
        assert "ended with status 2: said" in refused([sys.executable, "-c", "print('said'); exit(2)"], "other words")


def test_what_is_paid_twice_or_not_in_the_ledger_is_told(tmp_path):
    for role in ("judge", "supervisor"):
        with closing(sqlite3.connect(tmp_path / f"{role}_calls.sqlite")) as calls, calls:
            calls.execute("CREATE TABLE calls (key TEXT, outcome TEXT, cost_usd REAL, reserved_usd REAL)")
            calls.executemany("INSERT INTO calls VALUES (?, ?, ?, ?)", [("a", "usable", 1, 0), ("b", "lost", 0, 2)])
    assert ledgers(tmp_path)["sums"] == Counter(answered=2, held=2, usd=6)
    record = tmp_path / "sent.jsonl"
    training = SimpleNamespace(folder=tmp_path, record=record)
    record.write_text('{"key": "x"}\n' * 4)
    assert spent_wrongly(training) == []
    record.write_text('{"key": "x"}\n' * 5)
    assert "5 answers sent" in spent_wrongly(training)[0]
    with closing(sqlite3.connect(tmp_path / "judge_calls.sqlite")) as calls, calls:
        calls.execute("INSERT INTO calls VALUES ('a', 'unusable', 1, 0)")
    assert spent_wrongly(training) == ["1 answers paid twice"]


def test_keys_are_in_the_environment_and_are_found_in_files(tmp_path, monkeypatch):
    monkeypatch.delenv("CHAOS_API_KEY", raising=False)
    with keys_in_environment():
        import os

        (tmp_path / "log").write_text(f"key {os.environ['CHAOS_API_KEY']}")
    assert "CHAOS_API_KEY" not in os.environ
    assert files_with_keys(tmp_path) == ["log"] and KEYS


def test_a_case_that_is_left_out_has_not_passed(tmp_path, monkeypatch, capsys):
    """It is told so, and played again at the next start."""
    reasons = ["not allowed here", ""]
    case = Case("one", "case", lambda folder, settings: Result({}, left_out=reasons.pop(0)))

    def table(results):
        return "; ".join(result.left_out or "played" for result in results)

    monkeypatch.setattr(suite, "PARTS", {"one": (lambda settings: [case], table)})
    for expected in ("one: 0 of 1 cases, 1 left out\n\nnot allowed here", "one: 1 of 1 cases\n\nplayed"):
        assert suite.main(["--folder", str(tmp_path)]) == 0
        assert expected in capsys.readouterr().out
    assert reasons == []
    assert Results(tmp_path).get(case).name == "case"


def test_a_small_disk_can_be_filled_and_is_gone_afterwards(tmp_path):
    try:
        with small_disk(tmp_path):
            filler = fill(tmp_path / "run")
            with pytest.raises(OSError, match="No space left"):
                (tmp_path / "run" / "more").write_bytes(b"x" * 100_000)
            filler.unlink()
            (tmp_path / "run" / "server.log").write_text("it stays")
    except LeftOut as reason:
        pytest.skip(str(reason))
    assert (tmp_path / "server.log").read_text() == "it stays" and not list((tmp_path / "run").iterdir())
