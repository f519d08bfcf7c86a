"""The journal in several files: every sequence of events, seals, kills and damages reads back as it was written."""

import errno
import json
import os
import shutil
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from classroom_rl.config.load import ROOT
from classroom_rl.errors import StorageError
from classroom_rl.rollout.store import journal as journal_module
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal, read_journal, request_of
from classroom_rl.rollout.store.journal_segments import JournalStream, decompress, segments_of

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


# An earlier version's journal ----------------------------------------------------------------------------------------


def test_an_old_journal_of_any_size_is_read_and_goes_on(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/support/old_run" / JOURNAL_NAME, tmp_path)
    old = list(read_journal(tmp_path / JOURNAL_NAME))
    finished = [event["conversation"] for event in old if event["event"] == "conversation"]
    journal = small_journal(tmp_path)
    expected = {id: journal.events(id) for id in finished}
    journal.append("turn", conversation="r0-0000", text="new")
    assert finished and len(segments_of(journal.path)) == 1
    for opened in (journal, reopened(journal)):
        assert {name: opened.events(name) for name in finished} == expected
        assert opened.begun(request_of(finished[0]))["request"] == request_of(finished[0])
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
        reread_texts = [json.loads(line)["text"] for line in stream.lines_at([start for start, _ in seen[::7]])]
        assert reread_texts == [text for _, text in seen[::7]] and list(stream.lines_at([])) == []
        assert stream.end == journal.end


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
            result = operation(*arguments, **named)
            if self.count == self._last:
                raise Killed
            return result

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
        assert [event["text"] for event in journal.events("r-0003")] == [text for text in written if int(text) % 5 == 3]
        journal.append("turn", conversation="r-0003", text="more")
        assert texts(folder)[-1] == "more"
        assert not files_of(folder, "unfinished-*") and len(files_of(folder, "*.jsonl")) == 0


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


class AnySequence(RuleBasedStateMachine):
    """What is appended, and what befalls the files, against a list of the events."""

    @initialize(segment_bytes=st.sampled_from([1, 300, 1500]), block_bytes=st.sampled_from([1, 200, 4000]))
    def begin(self, segment_bytes: int, block_bytes: int) -> None:
        self._temporary = TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self.sizes = {"segment_bytes": segment_bytes, "block_bytes": block_bytes}
        self.written: list[tuple[int, dict[str, Any]]] = []
        self.of: dict[str, list[str]] = defaultdict(list)
        self.begun: dict[str, dict[str, str]] = {}
        self.weights: str | None = None
        self.journal = Journal(self.folder, **self.sizes)

    def append(self, event: str, **fields: Any) -> None:
        position = self.journal.append(event, **fields)
        self.written.append((position, {"event": event, **fields}))

    @rule(request=st.sampled_from(["a", "b-0001", "c"]), index=st.integers(0, 2), text=st.text(max_size=30))
    def say(self, request: str, index: int, text: str) -> None:
        conversation = f"{request}-{index:04d}"
        self.append("turn", conversation=conversation, text=text)
        self.of[conversation].append(text)

    @rule(request=st.sampled_from(["a", "b-0001", "c"]), body=st.sampled_from(["x", "y"]))
    def begin_batch(self, request: str, body: str) -> None:
        fields = {"weights": "w", "body": body}
        self.append("batch", request=request, **fields)
        if self.begun.get(request) not in (None, fields):
            for index in range(3):
                self.of.pop(f"{request}-{index:04d}", None)
        self.begun[request] = fields

    @rule(name=st.sampled_from(["v1", "v2"]))
    def load_weights(self, name: str) -> None:
        self.append("weights", policy=name)
        self.weights = name

    @rule(count=st.integers(9, 20))
    def begin_other_batches(self, count: int) -> None:
        """So many that the journal forgets the positions of earlier ones."""
        for number in range(count):
            self.append("batch", request=f"other{number}", weights="w", body="x")

    @rule()
    def compress(self) -> None:
        for thread in self.journal._threads:
            thread.join()

    @rule(torn=st.binary(max_size=40).filter(lambda torn: b"\n" not in torn))
    def restart(self, torn: bytes) -> None:
        self.journal.close()
        with (self.folder / JOURNAL_NAME).open("ab") as file:
            file.write(torn)
        self.journal = Journal(self.folder, **self.sizes)

    @rule(with_index=st.booleans(), half=st.binary(max_size=9), data=st.data())
    def restart_after_a_kill_while_compressing(self, with_index: bool, half: bytes, data: st.DataObject) -> None:
        """With the plain segment still there, and maybe half a compressed one, or a whole one."""
        self.journal.close()
        segments = segments_of(self.journal.path)
        for segment in data.draw(st.lists(st.sampled_from(segments), unique=True)) if segments else ():
            decompress(segment)
            segment.compressed.with_name(f"unfinished-{segment.compressed.name}").write_bytes(half)
            if not with_index:
                segment.index.unlink()
                segment.compressed.unlink()
        self.journal = Journal(self.folder, **self.sizes)

    @invariant()
    def everything_is_there(self) -> None:
        path = self.folder / JOURNAL_NAME
        journaled = [{k: v for k, v in event.items() if k != "time"} for event in read_journal(path)]
        assert journaled == [event for _, event in self.written]
        for request, fields in self.begun.items():
            assert self.journal.begun(request).items() >= fields.items()
        for position, event in self.written[-3:] + self.written[:3]:
            assert self.journal.read_at(position).items() >= event.items()
        weights = self.journal.loaded_weights()
        assert (weights and weights["policy"]) == self.weights
        for request in ("a", "b-0001", "c"):
            for index in range(3):
                events = self.journal.events(f"{request}-{index:04d}")
                assert [event["text"] for event in events] == self.of[f"{request}-{index:04d}"]

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            self._temporary.cleanup()


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
