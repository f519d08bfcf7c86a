"""The ledger of paid requests: spent and reserved dollars over restarts, and replies that are found again."""

import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.engines.api.call_ledger import _SCHEMA, LOST, UNUSABLE, USABLE, CallLedger, CallUsage
from classroom_rl.errors import StorageError
from classroom_rl.rollout.engine import BATCH, Usage
from tests.conftest import ROOT


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "calls.sqlite"


def test_a_request_is_held_at_its_worst_case_until_it_is_settled(path):
    ledger = CallLedger(path)
    call = ledger.enter("k", "m", 0.5)
    assert (ledger.spent_usd, ledger.reserved_usd) == (0.0, 0.5)
    ledger.settle(call, USABLE, "yes", CallUsage(10, 2, 0.125))
    assert (ledger.spent_usd, ledger.reserved_usd) == (0.125, 0.0)
    assert (ledger.prompt_tokens, ledger.completion_tokens) == (10, 2)


def test_what_may_have_been_billed_unseen_stays_held(path):
    ledger = CallLedger(path)
    ledger.settle(ledger.enter("k", "m", 0.5), "timeout", "", None, keep_reserved=True)
    ledger.settle(ledger.enter("k", "m", 0.5), "429", "", None)
    assert (ledger.spent_usd, ledger.reserved_usd) == (0.0, 0.5)


def test_nothing_is_entered_that_may_pass_the_cap(path):
    ledger = CallLedger(path, cap_usd=1.0)
    first = ledger.enter("a", "m", 0.75)
    assert ledger.enter("b", "m", 0.5) is None
    ledger.settle(first, USABLE, "", CallUsage(1, 1, 0.5))
    assert ledger.enter("b", "m", 0.5) is not None
    assert ledger.enter("c", "m", 0.0) is not None


def test_only_replies_are_found_and_the_first_of_them(path):
    ledger = CallLedger(path)
    for outcome, text in (("500", "down"), (UNUSABLE, "prose"), (USABLE, "later")):
        ledger.settle(ledger.enter("k", "m", 0.0), outcome, text, CallUsage(1, 1, 0.0))
    ledger.settle(ledger.enter("other", "m", 0.0), "timeout", "no reply", None)
    ledger.enter("third", "m", 0.0)
    assert ledger.find_reply("k")[0] == "prose"
    assert ledger.find_reply("other") is ledger.find_reply("third") is ledger.find_reply("nothing") is None


def test_all_of_it_survives_a_restart_and_what_was_in_flight_stays_held(path):
    ledger = CallLedger(path)
    ledger.settle(ledger.enter("a", "m", 0.5), USABLE, "yes", CallUsage(10, 2, 0.125))
    ledger.settle(ledger.enter("b", "n", 0.5), "429", "slow down", None)
    ledger.enter("c", "m", 0.25)
    ledger.close()
    reopened = CallLedger(path, cap_usd=0.5)
    assert (reopened.spent_usd, reopened.reserved_usd, reopened.prompt_tokens) == (0.125, 0.25, 10)
    assert reopened.outcomes == {("m", USABLE): 1, ("n", "429"): 1, ("m", LOST): 1}
    assert reopened.find_reply("a")[0] == "yes"
    assert reopened.enter("d", "m", 0.126) is None and reopened.enter("d", "m", 0.125) is not None


def test_a_killed_process_loses_nothing(path):
    script = (
        "import os, sys; from pathlib import Path\n"
        "from classroom_rl.engines.api.call_ledger import *\n"
        "ledger = CallLedger(Path(sys.argv[1]))\n"
        "ledger.settle(ledger.enter('a', 'm', 0.5), USABLE, 'yes', CallUsage(10, 2, 0.125))\n"
        "ledger.enter('b', 'm', 0.25)\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, timeout=600)
    assert killed.returncode == -9
    ledger = CallLedger(path)
    assert (ledger.find_reply("a")[0], ledger.spent_usd, ledger.reserved_usd) == ("yes", 0.125, 0.25)


def test_figures_of_a_batch_are_its_own_and_add_up_over_restarts(path):
    ledger = CallLedger(path)
    BATCH.set("step-1")
    ledger.settle(ledger.enter("a", "m", 0.5), "500", "", None)
    ledger.settle(ledger.enter("a", "m", 0.5), "timeout", "", None, keep_reserved=True)
    ledger.settle(ledger.enter("a", "m", 0.5), UNUSABLE, "prose", CallUsage(10, 2, 0.25))
    ledger.close()
    ledger = CallLedger(path)
    ledger.settle(ledger.enter("b", "m", 0.5), USABLE, "yes", CallUsage(20, 3, 0.125))
    BATCH.set("step-2")
    ledger.settle(ledger.enter("c", "m", 0.5), USABLE, "yes", CallUsage(1, 1, 1.0))
    assert ledger.usage("step-1") == Usage(
        calls=4,
        retries=2,
        unusable=1,
        failures={"500": 1, "timeout": 1},
        prompt_tokens=30,
        completion_tokens=5,
        cost_usd=0.375,
        reserved_usd=0.5,
        run_cost_usd=1.375,
    )
    assert ledger.usage("step-3") == Usage(run_cost_usd=1.375)


def test_whether_a_reply_was_cut_off_is_kept_also_where_nobody_counted_its_tokens(path):
    ledger = CallLedger(path)
    for key, cut in (("cut", True), ("whole", False)):
        ledger.settle(ledger.enter(key, "m", 0.5), UNUSABLE, "half", None, cut=cut)
    ledger.close()
    reopened = CallLedger(path)
    assert [reopened.find_reply(key)[2] for key in ("cut", "whole")] == [True, False]


def test_a_file_from_before_cut_replies_were_marked_opens_with_all_that_it_holds(path):
    path.parent.mkdir()
    old = sqlite3.connect(path)
    old.executescript(
        _SCHEMA.replace("cut INTEGER", "").replace("TEXT,               -- the reply", "TEXT -- the reply")
    )
    assert "cut" not in {column[1] for column in old.execute("PRAGMA table_info(calls)")}
    row = (1.0, "", "m", "k", USABLE, 10, 2, 0.125, 0.0, "yes")
    names = "time, batch, model, key, outcome, prompt_tokens, completion_tokens, cost_usd, reserved_usd, text"
    old.execute(f"INSERT INTO calls ({names}) VALUES ({', '.join('?' * len(row))})", row)
    old.commit()
    old.close()
    for spent in (0.125, 0.375):  # opened twice: the column is added once
        ledger = CallLedger(path)
        assert ledger.find_reply("k") == ("yes", CallUsage(10, 2, 0.125), None) and ledger.spent_usd == spent
        ledger.settle(ledger.enter("new", "m", 0.5), USABLE, "more", CallUsage(1, 1, 0.25), cut=True)
        assert ledger.find_reply("new")[2] is True
        ledger.close()


def test_two_programs_cannot_spend_from_one_ledger(path, monkeypatch):
    holder = CallLedger(path)
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **named: connect(*args, **named, timeout=0.1))
    with pytest.raises(StorageError, match="End the other program"):
        CallLedger(path)
    holder.close()
    CallLedger(path)


def test_a_damaged_file_is_named(path):
    path.parent.mkdir()
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="calls.sqlite, cannot be used: file is not a database"):
        CallLedger(path)


def test_a_kept_reply_that_cannot_be_read_counts_as_none_and_impossible_figures_as_not_stated(path):
    ledger = CallLedger(path)
    for key, cost in (("text", 0.5), ("blob", 0.0), ("null", 0.0), ("good", 0.25)):
        ledger.settle(ledger.enter(key, "m", 1.0), USABLE, "yes", CallUsage(10, 2, cost))
    ledger.settle(ledger.enter("text", "m", 1.0), USABLE, "later", CallUsage(10, 2, 0.5))
    for change in (
        "text = CAST(x'ff' AS TEXT), prompt_tokens = 1e300 WHERE id = 1",
        "text = x'6869', cost_usd = 9e999 WHERE id = 2",
        "text = NULL, completion_tokens = 9223372036854775807 WHERE id = 3",
        "completion_tokens = 9223372036854775807 WHERE id = 4",
    ):
        ledger._run(f"UPDATE calls SET {change}")
    ledger.close()
    reopened = CallLedger(path, cap_usd=2.5)
    replies = [reopened.find_reply(key) for key in ("text", "blob", "null", "good")]
    assert [reply and reply[0] for reply in replies] == ["later", None, None, "yes"]
    assert reopened.find_reply("good")[1] == CallUsage(10, 0, 0.25)
    assert (reopened.spent_usd, reopened.prompt_tokens, reopened.completion_tokens) == (1.25, 40, 6)
    assert reopened.usage(BATCH.get()).prompt_tokens == 40 and reopened.enter("next", "m", 1.25) is not None


EVENTS = st.lists(
    st.tuples(st.floats(0, 2), st.floats(0, 1), st.sampled_from(["answer", "unseen", "refused", "open"])), max_size=30
)


@settings(max_examples=40)
@given(EVENTS, st.floats(0, 5))
def test_spent_and_held_never_pass_the_cap_and_equal_what_the_table_says(events, cap):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.sqlite"
        ledger = CallLedger(path, cap)
        for worst, share, event in events:
            call = ledger.enter("k", "m", worst)
            if call is not None and event != "open":
                usage = CallUsage(1, 1, worst * share) if event == "answer" else None
                ledger.settle(call, USABLE if event == "answer" else event, "", usage, event == "unseen")
            assert ledger.spent_usd + ledger.reserved_usd <= cap + 1e-9
        ledger.close()
        reopened = CallLedger(path)
        assert (reopened.spent_usd, reopened.reserved_usd) == pytest.approx((ledger.spent_usd, ledger.reserved_usd))
        reopened.close()
