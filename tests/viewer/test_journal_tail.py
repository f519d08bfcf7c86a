"""The page reads a journal in segments as it reads one in a single file."""

import json
from pathlib import Path
from typing import Any

import pytest

import classroom_rl.viewer.journal_tail
from classroom_rl.config.load import ROOT
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal
from classroom_rl.rollout.store.journal_segments import segments_of
from classroom_rl.viewer.journal_tail import JournalTail

OLD_RUN = ROOT / "tests/support/old_run" / JOURNAL_NAME


def shown(tail: JournalTail) -> list[tuple[Any, ...]]:
    """What a page has of a journal: rows, and all that is known of each conversation."""
    found = tail.conversations(0.0, ())
    return [(tail.row(each), tail.record(each)) for each in found] + [tail.policy]


@pytest.mark.parametrize("longest_tail", [10**9, 20_000])
def test_a_page_that_follows_a_journal_in_segments_shows_what_is_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest_tail: int
) -> None:
    monkeypatch.setattr(classroom_rl.viewer.journal_tail, "_LONGEST_TAIL", longest_tail)
    journal = Journal(tmp_path, segment_bytes=4000, block_bytes=1000)
    one_file = tmp_path / "one" / JOURNAL_NAME
    one_file.parent.mkdir()
    following, beside = JournalTail(journal.path), JournalTail(one_file)
    for number, line in enumerate(OLD_RUN.read_bytes().splitlines(keepends=True)):
        event = json.loads(line)
        journal.append(event.pop("event"), **event)
        with one_file.open("ab") as file:
            file.write(line)
        if number % 7 == 0:
            assert shown(following) == shown(beside)
            assert shown(JournalTail(journal.path)) == shown(JournalTail(one_file)), "a page that is opened now"
    journal.close()
    assert len(segments_of(journal.path)) > 8 and len(shown(following)) > 8
    assert shown(following) == shown(beside)
