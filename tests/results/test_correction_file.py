"""Tests of corrections.parquet: what is written comes back, it names its tokenizer, and other files are refused."""

import hashlib
from dataclasses import fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from classroom_rl.errors import DataError
from classroom_rl.results.corrections import (
    CORRECTION_SCHEMA,
    Correction,
    holds_corrections,
    read_corrections,
    tokenizer_fingerprint,
    write_corrections,
)

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
    both = [ONE, replace(ONE, conversation="r-0002", draft_ids=[], draft_logprobs=[])]
    write_corrections(path, both, "abc")
    assert read_corrections(path) == (both, "abc")
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
    wanted = hashlib.sha256(b'[["a", 1], ["b", 0]]').hexdigest()
    assert tokenizer_fingerprint(Words(b=0, a=1)) == tokenizer_fingerprint(Words(a=1, b=0)) == wanted
    assert len({tokenizer_fingerprint(each) for each in (Words(a=0), Words(a=1), Words(b=0), Words(é=0))}) == 4


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
