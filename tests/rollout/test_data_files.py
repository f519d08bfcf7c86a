"""Odd data files, as people have them: what comes out is exactly what was written, or an error that says what to do."""

import csv
import datetime
import decimal
import gzip
import io
import json
import os
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.load import load
from classroom_rl.config.train_sft import ConversationSource, TrainSFTConfig
from classroom_rl.errors import DataError
from classroom_rl.rollout.data_files import READERS
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.trainer.sft.run import read_conversations, read_datasets

ANSWER = "problem,answer\np,{}\n"
"""A CSV file with one problem, whose answer is to be filled in."""
ROW = '{"problem": "p", "answer": "a"}\n'
PLAIN = [("p", "a")]


def answered(written: str, suffix: str = "csv") -> str:
    """A file with one problem p and this answer, in JSON as it is written there."""
    if suffix == "csv":
        return ANSWER.format(written)
    line = f'{{"problem": "p", "answer": {written}}}'
    return f"[{line}]" if suffix == "json" else f"{line}\n"


def parquet(**columns: pa.Array | list) -> bytes:
    target = io.BytesIO()
    pq.write_table(pa.table({"problem": ["p"], **columns}), target)
    return target.getvalue()


def pandas_index() -> bytes:
    import pandas

    return pandas.DataFrame({"problem": ["p"], "answer": ["007"]}).to_csv().encode()


def zipped() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("problems.csv", ANSWER.format("a"))
    return target.getvalue()


MORE_FIELDS = "fields, but the header has 2. Put a field with commas, quotes or line breaks in double quotes"
NO_TEXT = ", and text is wanted. Text, numbers, true and false can be read as text"
FILES = {
    "csv: with a byte order mark": (ANSWER.format("ä").encode("utf-8-sig"), [("p", "ä")]),
    "json: with a byte order mark": (f"[{ROW}]".encode("utf-8-sig"), PLAIN),
    "csv: in UTF-16": (ANSWER.format("a").encode("utf-16"), "p.csv is not UTF-8: .* Save it as UTF-8"),
    "csv: in Latin-1": (ANSWER.format("é").encode("latin-1"), "p.csv is not UTF-8 .*save it as UTF-8"),
    "csv: with a NUL in a field": ("problem,answer\n" + "p" * 70 + ",a\0b\n", "row 1, column answer .* NUL"),
    "csv: with a NUL at its beginning": (ANSWER.format("a\0b"), "p.csv is not UTF-8: it has NUL bytes"),
    "jsonl: with a NUL": (answered(r'"a\u0000b"', "jsonl"), "row 1, column answer holds a NUL character"),
    "jsonl: with half a character": (answered(r'"\ud83d"', "jsonl"), "row 1, column answer .*lone surrogate"),
    "csv: a comma too many in the first row": ("problem,answer\n1,2,3\nq,b\n", f"p.csv: line 2: 3 {MORE_FIELDS}"),
    "csv: a field too few": ("problem,answer\np,a\nq\n", f"p.csv: line 3: 1 {MORE_FIELDS}"),
    "csv: a wrong row of several lines": ('problem,answer\n"p\nq",a,b\n', f"p.csv: lines 2 to 3: 3 {MORE_FIELDS}"),
    "csv: line breaks in quotes": ('problem,answer\n"p\nq\r\nr",a\n', [("p\nq\r\nr", "a")]),
    "csv: quotes in quotes": ('problem,answer\n"say ""p""",a\n', [('say "p"', "a")]),
    "csv: a quote inside a field": ('problem,answer\na 5" pipe,a\n', [('a 5" pipe', "a")]),
    "csv: quotes with backslashes": ('problem,answer\n"say \\"p\\"",a\n', "line 2: .*write a quote in it twice"),
    "csv: a quote that is not closed": ('problem,answer\n"p,a\nq,b\n', "line 3: unexpected end of data. Put a"),
    "csv: line ends of Windows": ("problem,answer\r\np,a\r\n", PLAIN),
    "csv: line ends of an old Mac": ("problem,answer\rp,a\r", PLAIN),
    "csv: no line end at the end": ("problem,answer\np,a", PLAIN),
    "csv: blank lines": ("\nproblem,answer\n\np,a\n\n", PLAIN),
    "csv: a line separator of Unicode": ("problem,answer\np\u2028q,a\x85b\n", [("p\u2028q", "a\x85b")]),
    "csv: semicolons": ("problem;answer\np;a\n", "p.csv: the header .* has no commas, but semicolons"),
    "csv: tabs": ("problem\tanswer\np\ta\n", "p.csv: the header .* has no commas, but tabs"),
    "csv: a column of pandas's index": (pandas_index(), [("p", "007")]),
    "csv: a column without a name at the end": ("problem,answer,\np,a,\n", PLAIN),
    "csv: two columns of a name": ("problem,answer,answer\np,a,b\n", "p.csv has two columns named answer"),
    "csv: a header without names": (",\np,a\n", "p.csv has no header"),
    "csv: no header": ("p,a\nq,b\n", "p.csv has no column problem, answer. It has: p, a"),
    "csv: a space before a name": ("problem, answer\np,a\n", "has no column answer. It has: problem,  answer"),
    "csv: a header only": ("problem,answer\n", "p.csv cannot be read: it holds no rows"),
    "csv: columns that nobody asked for": ("id,problem,when,answer\n1,p,1945-05-08,a\n", PLAIN),
    "csv: that is a ZIP archive": (zipped(), "p.csv is not what its name says: it is a ZIP archive"),
    "jsonl: that is compressed": (gzip.compress(ROW.encode()), "it is compressed with gzip"),
    "csv: that is Parquet": (parquet(answer=["a"]), "p.csv is not what its name says: it is a Parquet file"),
    "parquet: that is CSV": (ANSWER.format("a"), "p.parquet cannot be read: .*Parquet magic bytes"),
    "json: that is CSV": (ANSWER.format("a"), "p.json cannot be read: line 1 is not JSON"),
    "csv: a pointer of Git LFS": ("version https://git-lfs.github.com/spec/v1\n", "only a pointer of Git LFS"),
    "parquet: nothing": (b"", "The file .*p.parquet is empty"),
    "jsonl: a list of objects": (f"[\n{ROW},\n{ROW}]", PLAIN * 2),
    "json: an object per line": (ROW * 2, PLAIN * 2),
    "json: one object over several lines": (json.dumps(json.loads(ROW), indent=2), PLAIN),
    "json: an object around the rows": (f'{{"data": [{ROW}]}}', "has no column problem, answer. It has: data"),
    "json: columns instead of rows": ('{"problem": ["p"], "answer": ["a"]}', "column problem holds a list"),
    "json: a list of texts": ('["p", "q"]', "p.json cannot be read: entry 1 is no JSON object, but"),
    "json: a line that is cut": (f'[{ROW},\n{{"problem": "q", "ans', 'line 3 is not JSON .*: \'{"problem": "q"'),
    "jsonl: line ends of Windows": (ROW.replace("\n", "\r\n") * 2, PLAIN * 2),
    "jsonl: a key twice": ('{"problem": "p", "answer": "a", "answer": "b"}', "line 1 .*'answer' twice"),
    "jsonl: NaN": (answered("NaN", "jsonl"), "line 1 is not JSON .NaN is no number of JSON"),
    "jsonl: nested too deep": (answered("[" * 100_000, "jsonl"), "line 1 is not JSON .it nests too deep"),
    "jsonl: a number that is too long": (answered("9" * 5000, "jsonl"), "line 1 is not JSON .Exceeds the limit"),
    "jsonl: a list": (answered("[1, 2]", "jsonl"), rf"p.jsonl: row 1, column answer holds a list.*{NO_TEXT}"),
    "json: an object": (answered('{"a": 1}', "json"), "p.json: row 1, column answer holds an object"),
    "jsonl: keys in another order, and others": (ROW + '{"n": {"m": [1]}, "answer": "a", "problem": "p"}', PLAIN * 2),
    "parquet: NaN": (parquet(answer=[float("nan")]), "row 1, column answer holds no finite number"),
    "parquet: a date": (parquet(answer=[datetime.date(1945, 5, 8)]), "row 1, column answer holds a date or"),
    "parquet: bytes": (parquet(answer=[b"a"]), "row 1, column answer holds bytes"),
    "parquet: a list": (parquet(answer=[["a"]]), "row 1, column answer holds a list"),
    "parquet: a struct": (parquet(answer=[{"a": 1}]), "row 1, column answer holds an object"),
    "parquet: odd columns that nobody asked for": (
        parquet(answer=["a"], when=pa.array([2**62], pa.timestamp("us")), image=[b"\xff"]),
        PLAIN,
    ),
    "parquet: a file that is cut": (parquet(answer=["a"])[:-4], "p.parquet cannot be read"),
    "parquet: no rows": (parquet(problem=pa.array([], pa.string())), "cannot be read: it holds no rows"),
    "csv: not there": (None, "There is no file .*p.csv"),
}
"""The kind of a file and what it is → its content, and its problems and answers or the words of the error."""
NAMES = {
    "P.CSV": (ANSWER.format("007"), [("p", "007")]),
    "my [1] *ö?.csv": (ANSWER.format("a"), PLAIN),
    "*.jsonl": (ROW, PLAIN),
    "p.tsv": ("problem\tanswer\np\ta\n", "p.tsv is a file of a kind that is not read. Data"),
    "p.jsonl.gz": (gzip.compress(ROW.encode()), "p.jsonl.gz is a file of a kind that is not read"),
    "answer=b/p.parquet": (parquet(answer=["a"]), PLAIN),
    "p.csv/inside": (b"", "p.csv is a folder, not a file"),
}
"""The same for names of files."""


def check(path: Path, content: str | bytes | None, wanted: list | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/no cache")  # a file is read without one
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = DatasetSource(name_or_path=str(path.parent if path.name == "inside" else path))
    if isinstance(wanted, list):
        assert [(problem.text, problem.answer) for problem in load_problems([source])] == wanted
        return
    with pytest.raises(DataError, match=wanted):
        load_problems([source])


@pytest.mark.parametrize("odd", FILES)
def test_an_odd_file_gives_exactly_its_problems_or_is_refused_in_words(tmp_path: Path, monkeypatch, odd: str) -> None:
    check(tmp_path / f"p.{odd.partition(':')[0]}", *FILES[odd], monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_may_have_any_name_with_a_suffix_that_is_read(tmp_path: Path, monkeypatch, name: str) -> None:
    check(tmp_path / name, *NAMES[name], monkeypatch)


WRITTEN = [
    *("1945-05-08", "1945-05-08T12:00:00Z", "007", "1.000", "1e5", "123456789012345678901", "3,5", "inf", "TRUE"),
    *("NA", "N/A", "null", "None", "nan", "", "x", " a ", "[1, 2]", r"\frac{1}{2}"),
    *("日本 ∑ עברית 🙂", "e\u0301", "a\u2028b\x85c", "x" * 200_000),
]
"""Texts that a reader of data files might take for something else."""


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json"])
def test_a_text_is_what_is_written_whatever_it_looks_like(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("problem", "answer"), *(("p", text) for text in WRITTEN)])
    else:
        lines = [answered(json.dumps(text, ensure_ascii=False), "jsonl") for text in WRITTEN]
        path.write_text("".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]", encoding="utf-8")
    assert [problem.answer for problem in load_problems([DatasetSource(str(path))])] == WRITTEN


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_value_of_json_is_the_text_that_is_written(tmp_path: Path, suffix: str) -> None:
    numbers = ["7", "1.000", "1.50", "1E5", "-0", "1" * 40, "1e999", "true", "false"]
    lines = [answered(value, "jsonl") for value in [*numbers, "null"]]
    path = tmp_path / f"p.{suffix}"
    path.write_text("".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]")
    assert [problem.answer for problem in load_problems([DatasetSource(str(path))])] == [*numbers, ""]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([2**62 + 1], str(2**62 + 1)),
        ([decimal.Decimal("1.000")], "1.000"),
        (pa.array([0.1], pa.float32()), "0.1"),
        (pa.array([np.float16(0.1)]), "0.099975586"),
        ([0.1], "0.1"),
        ([True], "true"),
        (pa.array([None], pa.string()), ""),
        (pa.array(["007"]).dictionary_encode(), "007"),
        (pa.array(["007"], pa.large_string()), "007"),
    ],
    ids=str,
)
def test_a_value_of_parquet_is_a_short_text_of_it(tmp_path: Path, value: pa.Array | list, text: str) -> None:
    (tmp_path / "p.parquet").write_bytes(parquet(answer=value))
    assert load_problems([DatasetSource(str(tmp_path / "p.parquet"))])[0].answer == text


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    """With the size and the time of the file before, which a cache would take for the same."""
    path = tmp_path / "p.csv"
    for answer in "ab":
        path.write_text(answered(answer))
        os.utime(path, (0, 0))
        assert load_problems([DatasetSource(name_or_path=str(path))])[0].answer == answer


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@given(st.lists(st.tuples(TEXTS.filter(str.strip), TEXTS), min_size=1))
def test_every_text_comes_out_of_every_kind_of_file_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    columns = dict(zip(("problem", "answer"), map(list, zip(*rows, strict=True)), strict=True))
    objects = [{"problem": problem, "answer": answer} for problem, answer in rows]
    with (folder / "p.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("problem", "answer"), *rows])
    (folder / "p.json").write_text(json.dumps(objects, ensure_ascii=False), encoding="utf-8")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in objects)
    (folder / "p.jsonl").write_text(lines, encoding="utf-8")
    pq.write_table(pa.table(columns), folder / "p.parquet")
    for suffix in READERS:
        problems = load_problems([DatasetSource(name_or_path=str(folder / f"p{suffix}"))])
        assert [(problem.text, problem.answer) for problem in problems] == rows, suffix


# Templates and messages ----------------------------------------------------------------------------------------------


def filled_in(folder: Path, name: str, content: str | bytes, template: str = "{{ answer }}") -> str:
    """The problem that a template makes of the only row of a file."""
    (folder / "t.txt").write_text(template)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    source = DatasetSource(name_or_path=str(folder / name), problem_template=str(folder / "t.txt"))
    return load_problems([source])[0].text


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json"])
@pytest.mark.parametrize("written", ["1945-05-08", "007", "NA", "[1.50, 2]", '["a"]', "{1, 2}", "true"])
def test_a_template_writes_the_text_that_the_file_holds(tmp_path: Path, suffix: str, written: str) -> None:
    quoted = '"' + written.replace('"', '""') + '"' if suffix == "csv" else json.dumps(written)
    assert filled_in(tmp_path, f"p.{suffix}", answered(quoted, suffix)) == written


@pytest.mark.parametrize("written", ["1.000", "7", "1e5"])
def test_a_template_writes_a_number_as_it_is_written_and_can_count_with_it(tmp_path: Path, written: str) -> None:
    rendered = filled_in(tmp_path, "p.jsonl", answered(written, "jsonl"), "{{ answer }}, {{ answer > 0.5 }}")
    assert rendered == f"{written}, True"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.parquet", parquet(answer=[datetime.date(1945, 5, 8)]), "row 1, column answer holds a date or time"),
        ("p.parquet", parquet(answer=[[b"a"]]), "row 1, column answer holds bytes"),
        ("p.jsonl", answered('["a"]', "jsonl"), "row 1: .*t.txt, line 1.*a list, .'a'., has no form as text"),
        ("p.json", answered('{"a": 1}', "json"), "row 1: .*t.txt, line 1.*an object, .* has no form as text"),
    ],
    ids=["date", "bytes", "list", "object"],
)
def test_what_a_template_cannot_write_is_refused_with_its_row(tmp_path: Path, name: str, content, words: str) -> None:
    with pytest.raises(DataError, match=words):
        filled_in(tmp_path, name, content)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("said", ["1945-05-08T12:00:00Z", "007", "1.000", "NA", "[1, 2]"])
def test_messages_are_learned_as_they_are_written(tmp_path: Path, suffix: str, said: str) -> None:
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    path = tmp_path / f"c.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["messages"], [json.dumps(messages)]])
    elif suffix == "parquet":
        pq.write_table(pa.table({"messages": [messages]}), path)
    else:
        path.write_text(json.dumps([{"messages": messages}] if suffix == "json" else {"messages": messages}))
    assert read_conversations([ConversationSource(name_or_path=str(path))]) == [messages]


def test_messages_that_are_no_text_are_refused_with_their_row(tmp_path: Path) -> None:
    date = datetime.date(1945, 5, 8)
    messages = [{"role": "user", "content": date}, {"role": "assistant", "content": date}]
    pq.write_table(pa.table({"messages": [messages]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="row 1, column messages holds a date or time, 1945-05-08"):
        read_conversations([ConversationSource(name_or_path=str(tmp_path / "c.parquet"))])


def test_fields_beside_the_messages_may_be_of_several_types_but_not_too_large(tmp_path: Path) -> None:
    def learned(extra: str) -> list:
        messages = [
            f'{{"role": "{role}", "content": "a", "id": {value}}}'
            for role, value in (("user", 1), ("assistant", extra))
        ]
        (tmp_path / "c.jsonl").write_text(f'{{"messages": [{", ".join(messages)}]}}')
        overrides = [
            f"dataset.train_datasets=[{{name_or_path: {tmp_path / 'c.jsonl'}}}]",
            f"logging.save_dir={tmp_path}",
        ]
        config = load(TrainSFTConfig, "train_sft", overrides)
        return read_datasets(config, None)[0]["messages"][0]

    assert [message["id"] for message in learned('"x"')] == [1, "x"]
    with pytest.raises(DataError, match="The fields of the messages do not go into one table: .*too large"):
        learned("9" * 30)


def test_an_empty_field_is_no_material_for_a_post_test(tmp_path: Path) -> None:
    """In a CSV file a row without siblings or steps has an empty field."""
    path = tmp_path / "kin.csv"
    siblings = '"[{""problem"": ""3 + 4?"", ""answer"": ""7""}]"'
    path.write_text(f"problem,answer,kin,parts\n1 + 1?,2,,\n2 + 2?,4,{siblings},\n")
    source = DatasetSource(str(path), sibling_problems_column="kin", steps_column="parts")
    problems = {problem.text: problem for problem in load_problems([source], -1, None)}
    assert [len(problems[text].material.siblings) for text in ("1 + 1?", "2 + 2?")] == [0, 1]
