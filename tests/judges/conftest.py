"""Readers trained on a small data set that is made for these tests."""

from pathlib import Path

import pytest

from classroom_rl.judges.moves.labelled import LabelledMessage, read_labelled
from classroom_rl.judges.moves.train import train
from tests.support.tutor_messages import write_data

FOLDS = 4


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A file of each data set."""
    return write_data(tmp_path_factory.mktemp("tutor_messages"))


@pytest.fixture(scope="session")
def labelled(data: list[str]) -> list[LabelledMessage]:
    """The messages of all three files."""
    return [message for file in data for message in read_labelled(file)]


@pytest.fixture(scope="session")
def folder(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trained readers."""
    out = tmp_path_factory.mktemp("readers") / "trained"
    train(data, out, folds=FOLDS)
    return out
