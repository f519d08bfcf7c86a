"""Segments of a journal and their indexes: what was lost is made anew, what is damaged is refused by name."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from classroom_rl.errors import StorageError
from classroom_rl.rollout.store.journal import JOURNAL_NAME
from classroom_rl.rollout.store.journal_segments import JournalStream, segments_of
from tests.rollout.store.test_journal import SMALL, files_of, journal_of, small_journal, texts


def test_a_large_journal_is_compressed_and_any_program_that_reads_gzip_reads_it(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, 250)
    segments = segments_of(journal.path)
    assert len(segments) > 3 and segments[0].start == 0
    assert all(segment.compressed.exists() and not segment.plain.exists() for segment in segments)
    assert journal.path.stat().st_size < SMALL["segment_bytes"] + 200
    plain = b"".join(gzip.decompress(segment.compressed.read_bytes()) for segment in segments)
    lines = (plain + journal.path.read_bytes()).splitlines()
    assert [json.loads(line)["text"] for line in lines] == [f"message {number}" for number in range(250)]


def test_the_oldest_segments_may_be_deleted(tmp_path: Path) -> None:
    journal_of(tmp_path, 200)
    oldest = segments_of(tmp_path / JOURNAL_NAME)[0]
    oldest.compressed.unlink()
    oldest.index.unlink()
    journal = small_journal(tmp_path)
    assert texts(tmp_path)[-1] == "message 199" and 0 < len(journal.events("r0-0004")) < 10
    assert len(journal.events("r3-0004")) == 10


def test_a_journal_without_files_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=JOURNAL_NAME):
        JournalStream(tmp_path / JOURNAL_NAME)
    journal = journal_of(tmp_path, 100)
    sealed = len(texts(tmp_path)) - len(journal.path.read_bytes().splitlines())
    journal.path.unlink()
    assert len(texts(tmp_path)) == sealed


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


@pytest.mark.parametrize("harm", ["deleted", "a byte", "cut short"])
def test_a_damaged_segment_is_refused_with_its_name(tmp_path: Path, harm: str) -> None:
    journal = journal_of(tmp_path, 200)
    path = segments_of(journal.path)[2].compressed
    content = path.read_bytes()
    if harm == "deleted":
        path.unlink()
    elif harm == "a byte":
        path.write_bytes(content[:-8] + bytes([content[-8] ^ 0xFF]) + content[-7:])  # of the checksum
    else:
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


def test_a_line_that_is_no_json_is_refused_with_its_file(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, 200)
    segment = segments_of(journal.path)[1].compressed
    content = segment.read_bytes()
    segment.write_bytes(gzip.compress(gzip.decompress(content).replace(b'"text"', b'"te"t"', 1)))
    with pytest.raises(StorageError, match=f"{segment.name} is damaged: the line at byte"):
        texts(tmp_path)
    segment.write_bytes(content)
    with journal.path.open("a") as file:
        file.write('{"ev"en\n')
    with pytest.raises(StorageError, match=f"{JOURNAL_NAME} is damaged: the line at byte"):
        texts(tmp_path)
