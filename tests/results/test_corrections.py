"""Tests of the file of decisions about corrections, of the precision that follows, and of corrections.parquet."""

import hashlib
import json
import resource
import threading
from dataclasses import fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from classroom_rl.errors import DataError, StorageError
from classroom_rl.results.corrections import (
    CORRECTION_SCHEMA,
    DECISIONS_NAME,
    LONGEST_TEXT,
    Correction,
    CorrectionDecision,
    append_decision,
    holds_corrections,
    precision_by_category,
    precision_of,
    read_corrections,
    read_decisions,
    tokenizer_fingerprint,
    write_corrections,
)


def decision(name: str = "accept", turn: int = 2, **more: object) -> CorrectionDecision:
    text = {"text": "Better."} if name == "edit" else {}
    return CorrectionDecision(
        **{"time": 1.5, "conversation": "c-0001", "turn": turn, "draft": -1, "decision": name, "category": "leak"}
        | text
        | more
    )


def test_a_line_holds_what_the_trainer_reads(tmp_path: Path) -> None:
    append_decision(tmp_path, decision("edit", text="Ask again: «où»?\nThen wait.", correction="Say «où»."))
    (line,) = (tmp_path / DECISIONS_NAME).read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "time": 1.5,
        "conversation": "c-0001",
        "turn": 2,
        "draft": -1,
        "decision": "edit",
        "text": "Ask again: «où»?\nThen wait.",
        "category": "leak",
        "message_was_fine": False,
        "correction": "Say «où».",
    }


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200).filter(str.strip)
DECISIONS = st.builds(
    lambda name, turn, draft, text, time: CorrectionDecision(
        time=time, conversation="c", turn=turn, draft=draft, decision=name, text=text if name == "edit" else ""
    ),
    st.sampled_from(["accept", "edit", "reject"]),
    st.integers(0, 2),
    st.integers(-1, 1),
    TEXTS,
    st.floats(0, 4e9),
)


@settings(max_examples=60)
@given(st.lists(DECISIONS, max_size=12), st.binary(max_size=40).filter(lambda cut: b"\n" not in cut), TEXTS)
def test_the_last_line_about_a_correction_wins_and_a_cut_one_is_no_line(tmp_path_factory, decisions, cut, text) -> None:
    folder = tmp_path_factory.mktemp("run")
    for entry in decisions:
        append_decision(folder, entry)
    expected = {entry.place: entry for entry in decisions}
    assert read_decisions(folder) == expected
    with (folder / DECISIONS_NAME).open("ab") as file:
        file.write(cut)
    assert read_decisions(folder) == expected
    later = decision("edit", text=text)
    append_decision(folder, later)
    assert read_decisions(folder) == expected | {later.place: later}


def test_a_cut_line_longer_than_a_block_is_dropped_too(tmp_path: Path) -> None:
    append_decision(tmp_path, decision())
    with (tmp_path / DECISIONS_NAME).open("ab") as file:
        file.write(b"x" * 10_000)
    append_decision(tmp_path, decision("reject", turn=4))
    assert [entry.decision for entry in read_decisions(tmp_path).values()] == ["accept", "reject"]


def test_a_line_that_is_no_decision_is_named(tmp_path: Path) -> None:
    append_decision(tmp_path, decision())
    with (tmp_path / DECISIONS_NAME).open("a") as file:
        file.write('{"time": 1, "conversation": "c", "turn": 0, "draft": -1, "decision": "perhaps"}\n')
    with pytest.raises(DataError, match=r"correction_decisions\.jsonl, line 2, is no decision .*: decision Input"):
        read_decisions(tmp_path)


def test_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    line = json.loads(decision().model_dump_json()) | {"who": "a teacher"}
    (tmp_path / DECISIONS_NAME).write_text(json.dumps(line) + "\n")
    assert list(read_decisions(tmp_path).values()) == [decision()]


@pytest.mark.parametrize(
    "changes",
    [
        {"decision": "edit", "text": ""},
        {"decision": "edit", "text": " \n\t"},
        {"decision": "edit", "text": "x" * (LONGEST_TEXT + 1)},
        {"decision": "edit", "text": "half \ud800"},
        {"decision": "accept", "text": "but better"},
        {"decision": "accept", "message_was_fine": True},
        {"decision": "maybe"},
        {"turn": -1},
        {"draft": -2},
        {"conversation": ""},
        {"time": float("nan")},
    ],
)
def test_what_is_no_decision_cannot_be_made(changes: dict) -> None:
    with pytest.raises(ValidationError):
        decision(**({"name": changes.pop("decision")} if "decision" in changes else {}), **changes)


def test_on_a_full_disk_nothing_is_written(tmp_path: Path) -> None:
    append_decision(tmp_path, decision())
    path = tmp_path / DECISIONS_NAME
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
    try:
        with pytest.raises(StorageError, match=DECISIONS_NAME):
            append_decision(tmp_path, decision("edit", text="long " * 100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    append_decision(tmp_path, decision("reject"))
    assert [entry.decision for entry in read_decisions(tmp_path).values()] == ["reject"]


def test_several_may_write_at_once(tmp_path: Path) -> None:
    def write(turn: int) -> None:
        for _ in range(20):
            append_decision(tmp_path, decision("edit", turn=turn, text="word " * 2000))

    writers = [threading.Thread(target=write, args=(turn,)) for turn in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_decisions(tmp_path)) == 4
    assert len((tmp_path / DECISIONS_NAME).read_text().splitlines()) == 80


# Precision -------------------------------------------------------------------------------------------------------


def test_precision_is_what_was_accepted_or_edited_of_what_was_decided() -> None:
    decisions = [decision(), decision("edit"), decision("reject"), decision("reject", message_was_fine=True)]
    precisions = precision_by_category([*decisions, decision(category="off_topic")])
    assert list(precisions) == ["leak", "off_topic"]
    leak = precisions["leak"]
    assert (leak.decided, leak.accepted, leak.edited, leak.rejected, leak.fine) == (4, 1, 1, 2, 1)
    assert leak.precision == 0.5 and (leak.low, leak.high) == (None, None), "of four, no interval is worth printing"
    nothing = precision_of("leak", [])
    assert (nothing.precision, nothing.low, nothing.high) == (None, None, None)
    leak = precision_of("leak", decisions * 2)
    assert (leak.low, leak.high) == pytest.approx((0.16, 0.84), abs=0.01)


ONE = Correction(
    conversation="r-0001",
    step=7,
    turn=2,
    draft=-1,
    policy="abc v12",
    prompt_ids=[1, 2, 3],
    draft_ids=[4, 5],
    draft_logprobs=[-0.5, -1.25],
    target_text="مرحبا 🎉 What did she eat?",
    target_ids=[6, 7, 8],
    category="leak",
    critique="It gives the answer away.",
    source="rules",
)


class Words:
    """A tokenizer with these tokens."""

    def __init__(self, **ids: int):
        self._ids = ids

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def test_corrections_come_back_as_they_were(tmp_path: Path):
    path = tmp_path / "corrections.parquet"
    corrections = [ONE, replace(ONE, conversation="r-0002", draft_ids=[], draft_logprobs=[])]
    write_corrections(path, corrections, "abc")
    assert read_corrections(path) == (corrections, "abc")
    assert [file.name for file in tmp_path.iterdir()] == ["corrections.parquet"]
    write_corrections(path, [], "def")
    assert read_corrections(path) == ([], "def"), "an empty file still names its tokenizer"


def test_the_columns_are_the_fields_with_their_types(tmp_path: Path):
    path = tmp_path / "corrections.parquet"
    write_corrections(path, [ONE], "abc")
    schema = pq.read_schema(path)
    assert schema.names == CORRECTION_SCHEMA.names == [item.name for item in fields(Correction)]
    assert {schema.field(f"{name}_ids").type.value_type for name in ("prompt", "draft", "target")} == {pa.int32()}
    assert schema.metadata[b"tokenizer"] == b"abc"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "corrections.parquet"
    write_corrections(path, [ONE], "abc")

    def break_off(table: pa.Table, target: Path, **_: object) -> None:
        target.write_bytes(b"PAR1")
        raise OSError("the machine went down")

    monkeypatch.setattr(pq, "write_table", break_off)
    with pytest.raises(OSError, match="went down"):
        write_corrections(path, [], "def")
    assert read_corrections(path) == ([ONE], "abc")


def test_the_fingerprint_is_that_of_the_sorted_vocabulary():
    expected = hashlib.sha256(b'[["a", 1], ["b", 0]]').hexdigest()
    assert tokenizer_fingerprint(Words(b=0, a=1)) == tokenizer_fingerprint(Words(a=1, b=0)) == expected
    assert len({tokenizer_fingerprint(words) for words in (Words(a=0), Words(a=1), Words(b=0), Words(é=0))}) == 4


def test_other_files_are_refused(tmp_path: Path):
    other, text, unnamed, wrong = (tmp_path / name for name in ("o.parquet", "c.txt", "u.parquet", "w.parquet"))
    pq.write_table(pa.table({"messages": ["a"]}), other)
    text.write_text("x")
    pq.write_table(pa.Table.from_pylist([], schema=CORRECTION_SCHEMA), unnamed)
    broken = pa.table({name: pa.array(["x"]) for name in CORRECTION_SCHEMA.names})
    pq.write_table(broken.replace_schema_metadata({"tokenizer": "abc"}), wrong)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    for path in (other, text, tmp_path / "cut.parquet"):
        assert not holds_corrections(path)
        with pytest.raises(DataError, match="is not a Parquet file with the columns of corrections"):
            read_corrections(path)
    with pytest.raises(DataError, match="none.parquet does not exist"):
        read_corrections(tmp_path / "none.parquet")
    assert holds_corrections(unnamed)
    with pytest.raises(DataError, match="does not say which tokenizer its ids are of"):
        read_corrections(unnamed)
    with pytest.raises(DataError, match="has a column of another type"):
        read_corrections(wrong)
