"""Files that tests of prompts and data sets write."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def template(tmp_path: Path) -> Callable[..., str]:
    """Writes a prompt template, and returns its path."""

    def write(text: str, name: str = "teacher.txt") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write
