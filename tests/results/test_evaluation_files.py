"""The conversations of evaluations on disk come back as they were."""

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from classroom_rl.environments.toy_language.lessons import make_lessons
from classroom_rl.environments.toy_language.scripts import ideal
from classroom_rl.errors import DataError
from classroom_rl.results import rollout_files
from classroom_rl.results.evaluation_files import read_records, write_records
from classroom_rl.rollout.tokens import Turn
from tests.support.synthetic_run import FAILED, played, record_of

LESSON = make_lessons(1)[1][0]


def test_records_come_back_as_they_were(tmp_path: Path):
    records = [
        played(ideal, LESSON, ["error_student"], 0),
        record_of("two", [Turn("teacher", "مرحبا 🎉")], [FAILED], 1),
    ]
    path = tmp_path / "conversations.parquet"
    write_records(path, [("sampled", records[0]), ("greedy", records[1]), ("sampled", records[1])])
    assert read_records(path) == {"sampled": records, "greedy": records[1:]}
    assert list(pd.read_parquet(path)["sampling"]) == ["sampled", "greedy", "sampled"]
    assert [file.name for file in tmp_path.iterdir()] == ["conversations.parquet"]


def test_files_that_eval_did_not_write_are_refused(tmp_path: Path):
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "x.parquet")
    for name in ("x.parquet", "none.parquet"):
        with pytest.raises(DataError, match="eval.py"):
            read_records(tmp_path / name)


def test_a_record_keeps_its_turns_in_a_file_and_an_older_file_is_read(tmp_path):
    record = record_of("p", [])
    record.max_turns = 21
    rollout_files.write_records(tmp_path / "new.parquet", [record])
    assert rollout_files.read_records(tmp_path / "new.parquet")[0].max_turns == 21
    older = pq.read_table(tmp_path / "new.parquet").drop_columns("max_turns")
    pq.write_table(older, tmp_path / "old.parquet")
    assert rollout_files.read_records(tmp_path / "old.parquet")[0].max_turns is None
