"""Readers always come out the same, beat chance on lessons that they have not seen, and come with a card."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.moves.cross_validation import BY_CLASSIFIER, agreement
from classroom_rl.judges.moves.labelled import read_labelled
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.moves.stored import CARD_NAME, JSON_NAME, TENSORS_NAME, load_readers
from classroom_rl.judges.moves.train import main, train
from tests.judges.conftest import FOLDS
from tests.support.tutor_messages import write_data


def content_of(folder: Path) -> dict:
    return json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))


def test_lessons_that_no_training_saw_are_read_better_than_by_chance(folder: Path, tmp_path: Path):
    readers = load_readers(folder)
    messages = [message for file in write_data(tmp_path, lessons=30, seed=2) for message in read_labelled(file)]
    for label, trust in readers.trust.items():
        of_label = [message for message in messages if label in message.labels]
        result = agreement(
            [message.labels[label] for message in of_label],
            [readers.reads(label, message.exchange) for message in of_label],
            [message.lesson for message in of_label],
        )
        assert result.ci95[0] > 0.3, (label, result)
        assert 0.3 < trust.ci95[0] <= trust.kappa <= trust.ci95[1]
    assert set(readers.trust) == set(RULES)
    assert BY_CLASSIFIER in {trust.by for trust in readers.trust.values()}


def test_what_agrees_best_reads(folder: Path):
    readers = content_of(folder)["readers"]
    for reader in readers.values():
        kappas = {kind: measures["kappa"] for kind, measures in reader["measured"].items()}
        assert kappas[reader["by"]] == max(kappas.values()) and {"rules", "classifier"} <= set(kappas)
    assert "rules_with_target" in readers["reveals_answer"]["measured"]


def test_training_twice_writes_the_same_bytes(folder: Path, data: list[str], tmp_path: Path):
    train(data, tmp_path / "again", folds=FOLDS)
    files = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert files == {name: (folder / name).read_bytes() for name in (JSON_NAME, TENSORS_NAME, CARD_NAME)}


def test_the_card_names_data_licences_and_figures(folder: Path):
    card = (folder / CARD_NAME).read_text(encoding="utf-8")
    for part in ("CC BY 2.5", "CC BY-SA 4.0", "Stasaski", "cima.jsonl", "4-fold", "base rate", "`telling`"):
        assert part in card
    files = content_of(folder)["card"]["data"]
    assert [file["messages"] for file in files] == [180, 216, 144] and all(len(file["sha256"]) == 64 for file in files)


def test_the_command(data: list[str], tmp_path: Path):
    out = tmp_path / "out"
    arguments = ["--data", data[2], "--out", str(out), "--folds", "3"]
    command = [sys.executable, "-m", "classroom_rl.judges.moves.train", *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("telling") and "κ" in process.stdout and process.stdout.endswith(f"{out}\n")
    assert set(load_readers(out).trust) == {"telling"}


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--data", str(tmp_path / "absent.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "There is no file" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        main(["--data", "a.jsonl", "--out", "b", "--folds", "1"])


def test_a_file_and_its_copy_are_refused(data: list[str], tmp_path: Path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(Path(data[0]).read_bytes())
    with pytest.raises(DataError, match="180 of the 180 messages in .*copy.jsonl are also in"):
        train([data[0], str(copy)], tmp_path / "out", folds=FOLDS)


def test_without_scikit_learn_the_error_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        load_readers(folder)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        train(["a.jsonl"], folder)
