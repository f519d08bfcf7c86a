"""The journal in several files: every sequence of events, seals, kills and damages reads back as it was written."""

import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.errors import StorageError
from classroom_rl.rollout.store import journal as journal_module
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal, read_journal, request_of
from classroom_rl.rollout.store.journal_segments import JournalStream, segments_of

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

SMALL = {"segment_bytes": 2000, "block_bytes": 500}


def small_journal(folder: Path) -> Journal:
    """A journal that seals a segment after about twenty events, in blocks of five."""
    return Journal(folder, **SMALL)


def reopened(journal: Journal) -> Journal:
    """The journal of a server that starts after this one ended, with all segments compressed."""
    journal.close()
    return small_journal(journal.path.parent)


def journal_of(folder: Path, count: int) -> Journal:
    """A journal with so many turns and compressed segments."""
    journal = small_journal(folder)
    add_turns(journal, 0, count)
    return reopened(journal)


def add_turns(journal: Journal, first: int, count: int) -> None:
    for number in range(first, first + count):
        journal.append("turn", conversation=f"r{number // 50}-{number % 5:04d}", text=f"message {number}")


def texts(folder: Path) -> list[str]:
    return [event["text"] for event in read_journal(folder / JOURNAL_NAME) if event["event"] == "turn"]


def files_of(folder: Path, pattern: str) -> list[Path]:
    return sorted((folder / "journal").glob(pattern))


# Segments ------------------------------------------------------------------------------------------------------------


def test_a_small_journal_is_one_plain_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    add_turns(journal, 0, 100)
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL_NAME]


def test_a_large_journal_is_compressed_and_read_as_before(tmp_path: Path) -> None:
    journal = small_journal(tmp_path)
    journal.append("weights", policy="run v3", version={"run_id": "run", "version": 3})
    journal.append("batch", request="r0", weights="w", body="b", step=7)
    first = journal.append("turn", conversation="r0-0001", text="the first")
    add_turns(journal, 50, 200)
    journal.close()
    again = small_journal(tmp_path)
    segments = segments_of(again.path)
    assert len(segments) > 3 and all(each.compressed.exists() and not each.plain.exists() for each in segments)
    assert segments[0].start == 0 and again.path.stat().st_size < SMALL["segment_bytes"] + 200
    for each in (journal, again):
        assert each.read_at(first)["text"] == "the first"
        assert each.loaded_weights()["policy"] == "run v3" and each.begun("r0")["step"] == 7
        assert [event["text"] for event in each.events("r0-0001")] == ["the first"]
        assert [event["text"] for event in each.events("r2-0003")] == [f"message {n}" for n in range(103, 150, 5)]
        assert each.events("r9-0000") == [] and each.begun("r1") is None
    assert texts(tmp_path) == ["the first", *(f"message {number}" for number in range(50, 250))]
    plain = b"".join(gzip.decompress(each.compressed.read_bytes()) for each in segments) + again.path.read_bytes()
    assert len(plain.splitlines()) == 203, "any program that reads gzip reads the segments"


def test_a_batch_that_begins_anew_forgets_what_segments_hold_of_it(tmp_path: Path) -> None:
    journal = small_journal(tmp_path)
    batch = {"request": "r1", "weights": "w"}
    journal.append("batch", **batch, body="old")
    add_turns(journal, 50, 50)
    journal = reopened(journal)
    journal.append("batch", **batch, body="old")
    assert len(journal.events("r1-0001")) == 10, "the same work goes on"
    journal.append("batch", **batch, body="new")
    assert journal.events("r1-0001") == []
    add_turns(journal, 51, 1)
    for each in (journal, reopened(journal)):
        assert [event["text"] for event in each.events("r1-0001")] == ["message 51"]


def test_memory_holds_the_positions_of_the_last_requests_only(tmp_path: Path) -> None:
    def held_after(count: int) -> int:
        tracemalloc.start()
        try:
            journal = Journal(tmp_path / str(count), segment_bytes=200_000, block_bytes=50_000)
            for number in range(count * 100):
                journal.append("turn", conversation=f"r{number // 100}-{number % 100:04d}")
                if number % 1000 == 0:
                    journal.events(f"r{number // 1000}-0000")
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            journal.close()

    few, many = held_after(10), held_after(110)
    assert (many - few) / 10_000 < 40, "bytes per conversation"


def test_the_oldest_segments_may_be_deleted(tmp_path: Path) -> None:
    journal_of(tmp_path, 200)
    oldest = segments_of(tmp_path / JOURNAL_NAME)[0]
    oldest.compressed.unlink()
    oldest.index.unlink()
    journal = small_journal(tmp_path)
    assert texts(tmp_path)[-1] == "message 199" and 0 < len(journal.events("r0-0004")) < 10
    assert len(journal.events("r3-0004")) == 10


# An earlier version's journal ----------------------------------------------------------------------------------------


def test_an_old_journal_of_any_size_is_read_and_goes_on(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/support/old_run" / JOURNAL_NAME, tmp_path)
    old = list(read_journal(tmp_path / JOURNAL_NAME))
    finished = [event["conversation"] for event in old if event["event"] == "conversation"]
    journal = small_journal(tmp_path)
    known = {each: journal.events(each) for each in finished}
    journal.append("turn", conversation="r0-0000", text="new")
    assert finished and len(segments_of(journal.path)) == 1
    for each in (journal, reopened(journal)):
        assert {name: each.events(name) for name in finished} == known
        assert each.begun(request_of(finished[0]))["request"] == request_of(finished[0])
    *before, last = read_journal(tmp_path / JOURNAL_NAME)
    assert before == old and last["text"] == "new"


# Readers beside a server ---------------------------------------------------------------------------------------------


def test_a_reader_beside_the_server_sees_each_event_once(tmp_path: Path) -> None:
    journal, done, seen = small_journal(tmp_path), Event(), []

    def follow() -> None:
        position, last_look = 0, False
        while not last_look:
            last_look = done.is_set()
            with JournalStream(journal.path) as stream:
                for start, line in stream.lines(position):
                    position = start + len(line)
                    seen.append((start, json.loads(line)["text"]))

    reader = Thread(target=follow)
    reader.start()
    add_turns(journal, 0, 3000)
    done.set()
    reader.join()
    journal.close()
    assert [text for _, text in seen] == [f"message {number}" for number in range(3000)]
    with JournalStream(journal.path) as stream:
        found = [json.loads(line)["text"] for line in stream.lines_at([start for start, _ in seen[::7]])]
        assert found == [text for _, text in seen[::7]] and list(stream.lines_at([])) == []
        assert stream.end == journal.end


def test_a_journal_without_files_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=JOURNAL_NAME):
        JournalStream(tmp_path / JOURNAL_NAME)
    journal = journal_of(tmp_path, 100)
    kept = len(texts(tmp_path)) - len(journal.path.read_bytes().splitlines())
    journal.path.unlink()
    assert len(texts(tmp_path)) == kept


# Killed --------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program runs after it."""


class Operations:
    """Counts the operations on files, and kills the program before or after one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int | None = None, done: bool = False):
        self.count, self._last, self._done = 0, last, done
        for owner, names in ((Path, ("rename", "replace", "unlink", "open", "write_text", "mkdir")), (os, ("fsync",))):
            for name in names:
                monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, operation: Callable) -> Callable:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self._last and not self._done:
                raise Killed
            found = operation(*arguments, **named)
            if self.count == self._last:
                raise Killed
            return found

        return counted


class AtOnce:
    """A thread that has run when it is started, so that a kill ends the program there."""

    def __init__(self, target: Callable[[], None], **_: object):
        self.start, self.join, self.is_alive = target, lambda: None, lambda: False


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "Thread", AtOnce)


def seal_two_segments(folder: Path) -> list[str]:
    """What was appended until the program ended."""
    written = []
    with suppress(Killed):
        journal = small_journal(folder)
        for number in range(60):
            journal.append("turn", conversation=f"r-{number % 5:04d}", text=str(number))
            written.append(str(number))
    return written


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_kill_at_any_operation_loses_no_event(at_once, tmp_path: Path, done: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        operations = Operations(patch)
        assert len(seal_two_segments(tmp_path / "whole")) == 60
    assert len(segments_of(tmp_path / "whole" / JOURNAL_NAME)) == 2
    for last in range(1, operations.count + 1):
        folder = tmp_path / str(last)
        with pytest.MonkeyPatch.context() as patch:
            Operations(patch, last, done)
            written = seal_two_segments(folder)
        if (folder / JOURNAL_NAME).exists() or segments_of(folder / JOURNAL_NAME):
            assert texts(folder) == written, f"a reader, killed at {last}"
        journal = small_journal(folder)
        assert texts(folder) == written, f"killed at {last}"
        assert [e["text"] for e in journal.events("r-0003")] == [text for text in written if int(text) % 5 == 3]
        journal.append("turn", conversation="r-0003", text="more")
        assert texts(folder)[-1] == "more"
        assert not files_of(folder, "unfinished-*") and len(files_of(folder, "*.jsonl")) == 0


CHILD = """
import sys
from pathlib import Path
from classroom_rl.rollout.store.journal import Journal

journal, number = Journal(Path(sys.argv[1]), segment_bytes=20_000, block_bytes=2_000), int(sys.argv[2])
while True:
    journal.append("turn", conversation=f"r{number // 100}-{number % 10:04d}", text=f"message {number}" * 9)
    number += 1
    print(number, flush=True)
"""


def test_a_process_that_is_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    count = 0
    for round_number in range(6):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(count)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        told = count
        for line in child.stdout:
            told = int(line)
            if told >= count + 300 + 37 * round_number:
                child.send_signal(signal.SIGKILL)
                break
        told = int([str(told), *child.stdout.read().split("\n")[:-1]][-1])
        child.wait()
        kept = [int(text.split("message ")[1]) for text in texts(tmp_path)]
        assert kept == list(range(len(kept))) and told <= len(kept) <= told + 1
        count = len(kept)
    journal = Journal(tmp_path, segment_bytes=20_000, block_bytes=2_000)
    found = sum(len(journal.events(f"r{number // 10}-{number % 10:04d}")) for number in range(count // 10 + 10))
    assert found == count > 2000 and len(segments_of(journal.path)) > 5
    journal.close()


# Full disks and damaged files ----------------------------------------------------------------------------------------


def fail_on(monkeypatch: pytest.MonkeyPatch, name: str, path_ends: str) -> None:
    """Make an operation on paths that end so fail as on a full disk."""
    operation = getattr(Path, name)

    def full(path: Path, *arguments: Any, **named: Any) -> Any:
        if str(path).endswith(path_ends) and (name != "open" or arguments[0][0] in "xw"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return operation(path, *arguments, **named)

    monkeypatch.setattr(Path, name, full)


@pytest.mark.parametrize(
    ("name", "path_ends"), [("open", ".jsonl.gz"), ("write_text", ".index.json"), ("replace", ".jsonl.gz")]
)
def test_a_full_disk_leaves_segments_uncompressed_until_there_is_room(
    at_once, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, path_ends: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_on(patch, name, path_ends)
        journal = small_journal(tmp_path)
        add_turns(journal, 0, 100)
    assert "stays uncompressed for now" in caplog.text and "No space left on device" in caplog.text
    assert not files_of(tmp_path, "*.gz") and len(files_of(tmp_path, "*.jsonl")) == len(segments_of(journal.path)) > 1
    for opened in (lambda: journal, lambda: small_journal(tmp_path)):
        assert [event["text"] for event in opened().events("r1-0002")] == [f"message {n}" for n in range(52, 100, 5)]
    assert texts(tmp_path) == [f"message {number}" for number in range(100)]
    assert files_of(tmp_path, "*.gz") and not files_of(tmp_path, "*.jsonl") + files_of(tmp_path, "unfinished-*")


@pytest.mark.parametrize(
    ("name", "path_ends"), [("open", JOURNAL_NAME), ("mkdir", "journal"), ("rename", JOURNAL_NAME)]
)
def test_a_segment_that_cannot_be_sealed_leaves_the_journal_whole(tmp_path: Path, name: str, path_ends: str) -> None:
    journal = small_journal(tmp_path)
    while journal.end < SMALL["segment_bytes"]:
        journal.append("turn", conversation="r-0000", text="before")
    count = len(texts(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        fail_on(patch, name, path_ends)
        with pytest.raises(StorageError, match="No space left on device"):
            journal.append("turn", conversation="r-0000", text="lost")
    assert texts(tmp_path) == ["before"] * count and not segments_of(journal.path)
    journal.append("turn", conversation="r-0000", text="after")
    assert texts(tmp_path) == ["before"] * count + ["after"] and len(segments_of(journal.path)) == 1
    assert [event["text"] for event in journal.events("r-0000")] == ["before"] * count + ["after"]
    journal.close()


@pytest.mark.parametrize("damage", ["lost", b"", b"{}", b'{"blocks": [0], "offsets": [0, 5]}'])
def test_an_index_that_was_lost_is_made_anew(tmp_path: Path, damage: str | bytes) -> None:
    journal_of(tmp_path, 200)
    indexes = files_of(tmp_path, "*.index.json")
    contents = [path.read_bytes() for path in indexes]
    for path in indexes:
        path.unlink() if damage == "lost" else path.write_bytes(damage)
    journal = small_journal(tmp_path)
    assert [event["text"] for event in journal.events("r2-0002")] == [f"message {n}" for n in range(102, 150, 5)]
    journal.close()
    assert [path.read_bytes() for path in indexes] == contents and len(contents) > 3
    assert not files_of(tmp_path, "*.jsonl")


def spoil(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("harm", ["deleted", "a byte", "cut short"])
def test_a_damaged_segment_is_refused_with_its_name(tmp_path: Path, harm: str) -> None:
    journal = journal_of(tmp_path, 200)
    path = segments_of(journal.path)[2].compressed
    content = path.read_bytes()
    match harm:
        case "deleted":
            path.unlink()
        case "a byte":
            spoil(path, len(content) // 2)
        case "cut short":
            path.write_bytes(content[:-100])
    with pytest.raises(StorageError, match=rf"{path.name}, a part of the journal, is missing or damaged.*Put it back"):
        for number in range(20):
            journal.events(f"r{number // 5}-{number % 5:04d}")
    with pytest.raises(StorageError, match="Put the missing file back" if harm == "deleted" else path.name):
        texts(tmp_path)
    if harm != "a byte":  # which is seen when it is read
        path.unlink(missing_ok=True)
        with pytest.raises(StorageError, match="Put the missing file back"):
            small_journal(tmp_path)
    path.write_bytes(content)
    assert texts(tmp_path) == [f"message {number}" for number in range(200)]
    assert sum(len(small_journal(tmp_path).events(f"r{n // 5}-{n % 5:04d}")) for n in range(20)) == 200


def test_a_segment_of_another_journal_is_refused(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, 100)
    path = segments_of(journal.path)[0].compressed
    shutil.copy(path, path.with_name("000000000100-000000002200.jsonl.gz"))
    with pytest.raises(StorageError, match="move files of another journal away"):
        small_journal(tmp_path)


def test_journal_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("turn", text="one\ntwo ✓")
    with journal.path.open("a") as file:
        file.write('{"event": "turn", "te')
    again = Journal(tmp_path)
    position = again.append("turn", text="three")
    assert [event["text"] for event in read_journal(journal.path)] == ["one\ntwo ✓", "three"]
    assert again.read_at(position)["text"] == "three"


def test_journal_line_is_there_before_append_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("turn", text="x")
    assert json.loads(journal.path.read_text())["text"] == "x"
