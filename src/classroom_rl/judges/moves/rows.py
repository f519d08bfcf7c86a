"""Rows of published data sets, from local .jsonl and .json files or from the Hub, each with where it stands."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from classroom_rl.config.base import DataSource
from classroom_rl.errors import DataError
from classroom_rl.rollout.datasets import is_local_name, load_rows


def numbered_rows(name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file or a Hub data set, each with its place in words, such as "a.jsonl: line 3".

    The rows of a .json file are a list, or an object of objects of rows.

    Args:
        split: the split of a data set on the Hub.

    Raises:
        DataError: if it cannot be read.
    """
    path = Path(name)
    if path.suffix == ".json":
        yield from _rows_of_json(path)
    elif path.suffix == ".jsonl":
        yield from _rows_of_lines(path)
    elif is_local_name(path):
        raise DataError(f"{name}: labelled messages are read from .jsonl and .json files, and from the Hub.")
    else:
        for number, row in enumerate(load_rows(DataSource(name, split)), start=1):
            yield f"{name} (split {split}): row {number}", row


def _rows_of_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON: {error}.") from error
        yield f"{path}: line {number}", _as_row(row, f"{path}: line {number}")


def _rows_of_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}.") from error
    if isinstance(found, dict) and found and all(isinstance(each, dict) for each in found.values()):
        found = [row for rows in found.values() for row in rows.values()]  # CIMA: {"prepDataset": {"0": {…}, …}, …}
    if not isinstance(found, list):
        raise DataError(f"{path} holds no list of rows.")
    for number, row in enumerate(found, start=1):
        yield f"{path}: row {number}", _as_row(row, f"{path}: row {number}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _as_row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where} is no JSON object.")
    return row
