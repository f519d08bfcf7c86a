"""Shipped files are found from any folder, and the user's own come first."""

from pathlib import Path

import pytest

from classroom_rl.system.shipped import ROOT, as_written, find_shipped

SHIPPED = next(path for path in sorted((ROOT / "prompt_templates").rglob("*.txt")))
NAME = str(SHIPPED.relative_to(ROOT))


def test_a_file_below_the_working_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_shipped(NAME) == str(SHIPPED)
    (tmp_path / NAME).parent.mkdir(parents=True)
    (tmp_path / NAME).touch()
    assert find_shipped(NAME) == NAME


@pytest.mark.parametrize("path", ["runs/mine", "pyproject.toml", "prompt_templates/none.txt", "/tmp", "some/model"])
def test_what_is_not_shipped_stays_as_it_is(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_shipped(path) == as_written(path) == path


def test_a_shipped_path_is_shown_as_configurations_write_it() -> None:
    assert as_written(str(SHIPPED)) == NAME
    assert as_written(str(ROOT / "runs/mine")) == str(ROOT / "runs/mine")
