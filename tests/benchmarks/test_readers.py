"""The benchmark of readers compares what it says, on a small data set that is made for tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.readers import BEFORE, HEADER, main, markdown, table, was_looked_at
from classroom_rl.config.load import ROOT
from classroom_rl.judges.moves.labelled import read_labelled
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.readings import Exchange
from tests.support.tutor_messages import write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutors")
    write_data(folder, lessons=16)
    return folder


def test_every_label_has_a_row_with_its_base_rate(data: Path):
    messages = [message for path in sorted(data.glob("*.jsonl")) for message in read_labelled(str(path))]
    rows = {row[0]: dict(zip(HEADER, row, strict=True)) for row in table(messages, folds=3)}
    assert set(rows) == {*RULES, "reveals_answer, answer known"} and set(BEFORE) == set(RULES)
    for label in RULES:
        labels = [message.labels[label] for message in messages if label in message.labels]
        assert rows[label]["base"] == f"{sum(labels) / len(labels):.2f}"
        assert rows[label]["messages (lessons)"] == f"{len(labels)} (16)"
    assert rows["reveals_answer, answer known"]["messages (lessons)"] == "72 (12)"
    hint = rows["hint"]
    assert hint["κ of what reads"] == hint[hint["reads"]], "whatever agrees best reads"


def test_the_command_prints_the_table(data: Path):
    command = [sys.executable, "-m", "benchmarks.readers", str(data), "--folds", "3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "| label | set |" in result.stdout and "\n| telling | MathDial |" in result.stdout
    assert "- hint: `feedback_kind` is metalinguistic" in result.stdout


def test_a_folder_without_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path)]) == 2
    assert "holds no .jsonl file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("label", "about", "holds"),
    [
        ("question", Exchange("Why?"), True),
        ("hint", Exchange("Look at the ending.", "ik bent", "ik ben"), True),
        ("hint", Exchange('It is "ik ben".', "ik bent", "ik ben"), False),
        ("correction", Exchange("That is wrong."), True),
        ("confirmation", Exchange("Great!"), True),
        ("reveals_answer", Exchange("You had 12 before.", "", "12"), True),
        ("reveals_answer", Exchange("You had 12 before.", "", ""), False),
        ("actionable", Exchange("Good. Try again."), True),
        ("mistake_identified", Exchange("Good."), False),
    ],
)
def test_what_the_project_read_before(label: str, about: Exchange, holds: bool):
    assert BEFORE[label][1](about) is holds


def test_about_half_of_the_lessons_were_looked_at():
    count = sum(was_looked_at(str(number)) for number in range(1000))
    assert 450 < count < 550 and was_looked_at("a") == was_looked_at("a")


def test_a_table_in_markdown():
    assert markdown(("a", "b"), [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
