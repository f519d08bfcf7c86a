"""Readers are trained without looking at what they are measured on, always come out the same, and beat chance."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.moves import classifier
from classroom_rl.judges.moves.classifier import TEXTS, Counted, Vectoriser, fit_linear, seen, texts_of
from classroom_rl.judges.moves.cross_validation import BY_CLASSIFIER, agreement, best_threshold, measure
from classroom_rl.judges.moves.labelled import LabelledMessage, read_labelled
from classroom_rl.judges.moves.stored import CARD_NAME, JSON_NAME, TENSORS_NAME, load_readers
from classroom_rl.judges.moves.train import main, train
from classroom_rl.judges.readings import LABELS, Exchange
from tests.judges.moves.conftest import FOLDS
from tests.support.tutor_messages import mrbench_rows, write_data, write_rows


def read_all(files: Sequence[str]) -> list[LabelledMessage]:
    return [each for file in files for each in read_labelled(file)]


def test_lessons_that_no_training_saw_are_read_better_than_by_chance(folder: Path, tmp_path: Path):
    readers = load_readers(folder)
    messages = read_all(write_data(tmp_path, lessons=30, seed=2))
    assert not {each.lesson for each in messages} & {"", None}
    for label, trust in readers.trust.items():
        there = [each for each in messages if label in each.labels]
        found = agreement(
            [each.labels[label] for each in there],
            [readers.reads(label, each.exchange) for each in there],
            [each.lesson for each in there],
        )
        assert found.ci95[0] > 0.3, (label, found)
        assert trust.ci95[0] > 0.3 and trust.ci95[0] <= trust.kappa <= trust.ci95[1]
    assert set(readers.trust) == set(LABELS)
    assert BY_CLASSIFIER in {trust.by for trust in readers.trust.values()}


def test_labels_that_mean_nothing_are_not_read_better_than_by_chance(data: list[str]):
    """The same messages with each lesson's labels of another lesson: whatever is measured now is chance."""
    messages = [each for each in read_all(data) if each.source == "MRBench"]
    shuffled = np.random.default_rng(0).permutation(len(messages))
    mixed = [replace(each, labels=messages[place].labels) for each, place in zip(messages, shuffled, strict=True)]
    for label, found in measure(mixed, FOLDS).items():
        assert abs(found.agreements[BY_CLASSIFIER].kappa) < 0.25, label


def test_what_is_read_in_a_lesson_does_not_depend_on_its_labels(data: list[str]):
    """Neither weights nor thresholds are chosen with the fold that is measured."""
    messages = [each for each in read_all(data) if each.source == "MRBench"]
    lesson = messages[0].lesson
    turned = [
        replace(each, labels={label: not value for label, value in each.labels.items()})
        if each.lesson == lesson
        else each
        for each in messages
    ]
    one, other = measure(messages, FOLDS), measure(turned, FOLDS)
    here = [place for place, each in enumerate(messages) if each.lesson == lesson]
    for label in one:
        assert (one[label].found[BY_CLASSIFIER][here] == other[label].found[BY_CLASSIFIER][here]).all()


def test_what_agrees_best_reads(folder: Path):
    content = json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))
    for reader in content["readers"].values():
        measured = {kind: found["kappa"] for kind, found in reader["measured"].items()}
        assert measured[reader["by"]] == max(measured.values())
        assert {"rules", "classifier"} <= set(measured)
    assert "rules_with_target" in content["readers"]["reveals_answer"]["measured"]


def test_training_twice_writes_the_same_bytes(folder: Path, data: list[str], tmp_path: Path):
    train(data, tmp_path / "again", folds=FOLDS)
    for name in (JSON_NAME, TENSORS_NAME, CARD_NAME):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name
    assert sorted(each.name for each in folder.iterdir()) == sorted([JSON_NAME, TENSORS_NAME, CARD_NAME])


def test_a_loaded_reader_scores_as_the_fitted_one(folder: Path, data: list[str]):
    readers = load_readers(folder)
    messages = read_all(data)
    compared = 0
    for label, stored in readers.stored.readers.items():
        if stored.by != BY_CLASSIFIER:
            continue
        there = [each for each in messages if each.source == stored.source]
        rows = [seen(label, each.exchange) for each in there]
        vectoriser = Vectoriser.fit(rows, texts_of(label))
        tables = vectoriser.tables(rows)
        scores = fit_linear(tables, [each.labels[label] for each in there]).scores(tables)
        assert [readers.score(label, each.exchange) for each in there] == pytest.approx(scores.tolist(), abs=1e-9)
        compared += 1
    assert compared >= 3


def test_n_grams_counted_once_are_those_of_each_part(data: list[str]):
    """A cross-validation counts them for all messages, and keeps what a part's own count would have found."""
    rows = [each.exchange for each in read_all(data)]
    train, test = np.arange(0, len(rows), 2), np.arange(1, len(rows), 2)
    vectoriser = Vectoriser.fit([rows[place] for place in train], TEXTS)
    parts = Counted(rows, TEXTS).tables(train, test)
    for found, places in zip(parts, (train, test), strict=True):
        expected = vectoriser.tables([rows[place] for place in places])
        assert list(found) == list(expected)
        for name, each in expected.items():
            difference = found[name] - each
            assert found[name].shape == each.shape and abs(difference).max() < 1e-12, name


def test_a_reader_of_the_message_alone_does_not_look_at_the_student(folder: Path):
    readers = load_readers(folder)
    about = Exchange("Nearly, but it is casa and not libro.", "está en libro rojo", "está en casa rojo")
    right = replace(about, student="está en casa rojo")
    alone = "treats_as_wrong"
    assert readers.reads(alone, about) == readers.reads(alone, right) == readers.reads(alone, Exchange(about.message))


def test_the_card_names_data_licences_and_figures(folder: Path):
    card = (folder / CARD_NAME).read_text(encoding="utf-8")
    for part in ("CC BY 2.5", "CC BY-SA 4.0", "Stasaski", "cima.jsonl", "4-fold", "base rate", "`telling`"):
        assert part in card
    content = json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))
    assert [each["messages"] for each in content["card"]["data"]] == [180, 216, 144]
    assert all(len(each["sha256"]) == 64 for each in content["card"]["data"])


def test_the_command(data: list[str], tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "classroom_rl.judges.moves.train",
        "--data",
        data[2],
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run([*command, "--folds", "3"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("telling") and "κ" in done.stdout and done.stdout.endswith(f"{tmp_path / 'out'}\n")
    assert set(load_readers(tmp_path / "out").trust) == {"telling"}


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--data", str(tmp_path / "absent.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "There is no file" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        main(["--data", "a.jsonl", "--out", "b", "--folds", "1"])


def test_too_little_data_is_refused(tmp_path: Path):
    file = str(write_rows(tmp_path / "few.jsonl", mrbench_rows(3, seed=1)))
    with pytest.raises(DataError, match="3 lessons; a cross-validation with 4 folds needs"):
        train([file], tmp_path / "out", folds=4)


def test_a_label_that_never_changes_is_refused(tmp_path: Path):
    rows = mrbench_rows(8, seed=1)
    for row in rows:
        row["labels"]["Actionability"] = "No"
    file = str(write_rows(tmp_path / "same.jsonl", rows))
    with pytest.raises(DataError, match="The label actionable is never given"):
        train([file], tmp_path / "out", folds=2)


def test_messages_without_a_frequent_ngram_are_refused():
    with pytest.raises(DataError, match="no n-gram is frequent enough"):
        Vectoriser.fit([Exchange("one two"), Exchange("three four")], ("words",))


def test_a_file_and_its_copy_are_refused(data: list[str], tmp_path: Path):
    copy = tmp_path / "copy.jsonl"
    copy.write_text(Path(data[0]).read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(DataError, match="180 of the 180 messages in .*copy.jsonl are also in"):
        train([data[0], str(copy)], tmp_path / "out", folds=FOLDS)


def test_without_scikit_learn_the_error_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        load_readers(folder)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        train(["a.jsonl"], folder)


def test_the_best_threshold_separates():
    given = np.array([False, False, True, True])
    assert 1 < best_threshold(given, np.array([0.0, 1.0, 2.0, 3.0])) <= 2


def test_the_settings_are_fixed():
    """A change of them changes every figure in docs/classroom.md."""
    assert classifier._REGULARISATION == 1.0
