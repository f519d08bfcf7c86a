"""Reads datasets and makes problems of their rows."""

import glob
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from ..errors import DataError
from .problem import PostTestMaterial, Problem
from .prompts import render, variables_of

if TYPE_CHECKING:
    import datasets


class DataSource(Protocol):
    """One dataset: a Hub name or a local file, and the share of it to take, in (0, 1]."""

    name_or_path: str
    split: str
    ratio: float


class DatasetSource(DataSource, Protocol):
    """A dataset of problems; fields as in `config.base.DatasetSource`."""

    problem_column: str
    answer_column: str | None
    problem_template: str | None
    columns: dict[str, str]
    sibling_problems_column: str | None
    steps_column: str | None


Source = TypeVar("Source", bound=DataSource)
Row = TypeVar("Row")
_LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
LOCAL_SUFFIXES = frozenset(_LOADERS)
"""Suffixes of local files; a name without one is a Hub name."""
_MATERIAL = TypeAdapter(PostTestMaterial)


def load_problems(sources: Sequence[DatasetSource], limit: int = -1, seed: int | None = None) -> list[Problem]:
    """The problems of all sources; see `gather`.

    Raises:
        DataError: if there is no source, a column is missing, a cell is empty, a row cannot be filled into its
            template, or nothing is left.
    """
    return gather(sources, _read_problems, limit, seed)


def gather(
    sources: Sequence[Source], read: Callable[[Source], list[Row]], limit: int = -1, seed: int | None = None
) -> list[Row]:
    """The rows that `read` finds in all sources. Each source is sampled down to its `ratio`, then all rows are shuffled
    with `seed` (None: not shuffled) and cut to `limit` (−1: all).

    Raises:
        DataError: if there is no source, a ratio is out of range, or nothing is left.
    """
    if not sources:
        raise DataError(
            "No dataset is configured. Name at least one, for example "
            "dataset.train_datasets=[{name_or_path: lessons.jsonl}]."
        )
    rows = [row for source in sources for row in _take_ratio(source, read, seed)]
    if seed is not None:
        random.Random(f"problems|{seed}").shuffle(rows)
    if limit >= 0:
        rows = rows[:limit]
    if not rows:
        names = ", ".join(source.name_or_path for source in sources)
        raise DataError(f"Nothing is left of {names}: check ratio, split and the example limit.")
    return rows


def _take_ratio(source: Source, read: Callable[[Source], list[Row]], seed: int | None) -> list[Row]:
    if not 0 < source.ratio <= 1:
        raise DataError(f"{source.name_or_path}: ratio is {source.ratio}; it must be above 0 and at most 1.")
    try:
        rows = read(source)
    except UnicodeDecodeError as error:
        raise DataError(f"{source.name_or_path} is not UTF-8: {error}.") from error
    if source.ratio < 1:
        count = round(len(rows) * source.ratio)
        rows = random.Random(f"ratio|{seed}|{source.name_or_path}").sample(rows, count)
    return rows


def _read_problems(source: DatasetSource) -> list[Problem]:
    rows = load_rows(source)
    columns = _text_columns(source)
    wanted = [*columns.values(), source.answer_column, source.sibling_problems_column, source.steps_column]
    missing = [column for column in wanted if column not in (None, *rows.column_names)]
    if missing:
        renaming = "columns={variable: column}" if source.problem_template else "problem_column"
        raise DataError(
            f"{source.name_or_path} has no column {', '.join(missing)}. It has: {', '.join(rows.column_names)}. "
            f"Name yours with {renaming} and answer_column (null: the problems have no answer); leave out "
            "sibling_problems_column and steps_column where there are none."
        )
    texts = _fill_in(source, rows, columns) if source.problem_template else rows[source.problem_column]
    answers = rows[source.answer_column] if source.answer_column else [None] * len(rows)
    return list(_to_problems(source, texts, answers, _material(source, rows)))


def _text_columns(source: DatasetSource) -> dict[str, str]:
    """Maps each template variable to its column; without a template, `problem` to the column of the text."""
    if source.problem_template is None:
        return {"problem": source.problem_column}
    variables = sorted(variables_of(source.problem_template))
    idle = sorted(set(source.columns) - set(variables))
    if idle:
        raise DataError(
            f"{source.name_or_path}: columns maps {', '.join(idle)}, but {source.problem_template} uses: "
            f"{', '.join(variables)}."
        )
    return {variable: source.columns.get(variable, variable) for variable in variables}


def _to_problems(source: DatasetSource, texts: Iterable, answers: Iterable, material: Iterable) -> Iterator[Problem]:
    for number, (text, answer, given) in enumerate(zip(texts, answers, material, strict=True), start=1):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{source.name_or_path}: row {number} has no text in column {source.problem_column}.")
        yield Problem.of(text, "" if answer is None else str(answer), given)


def _material(source: DatasetSource, rows: "datasets.Dataset") -> Iterator[PostTestMaterial]:
    """What post-tests need, from the columns that the source names for it."""
    columns = {"siblings": source.sibling_problems_column, "steps": source.steps_column}
    named = {name: column for name, column in columns.items() if column is not None}
    if not named:
        yield from [PostTestMaterial()] * len(rows)
        return
    for number, row in enumerate(rows.select_columns(list(named.values())), start=1):
        cells = {name: _without_nulls(_cell(row[column])) for name, column in named.items()}
        try:
            yield _MATERIAL.validate_python({name: cell for name, cell in cells.items() if cell is not None})
        except ValidationError as error:
            first = error.errors()[0]
            raise DataError(
                f"{source.name_or_path}: row {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}. In "
                "sibling_problems_column holds lists of {problem, answer, steps}, steps_column lists of {name, value}."
            ) from error


def _without_nulls(value: Any) -> Any:
    """JSON data without the nulls that a table has where an object lacks a field of another one."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _fill_in(source: DatasetSource, rows: "datasets.Dataset", columns: dict[str, str]) -> Iterator[str]:
    for number, row in enumerate(rows, start=1):
        values = {variable: _cell(row[column]) for variable, column in columns.items()}
        empty = [columns[variable] for variable, value in values.items() if value in (None, "", [], {})]
        if empty:
            raise DataError(f"{source.name_or_path}: row {number} has nothing in column {', '.join(empty)}.")
        try:
            yield render(source.problem_template, **values)
        except DataError as error:
            raise DataError(f"{source.name_or_path}: row {number}: {error}") from error


def _cell(value: Any) -> Any:
    """A cell's value for a template. Lists and objects written as JSON text, as in CSV files, are parsed."""
    if not isinstance(value, str):
        return value
    value = value.strip()
    if value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):  # plain text that begins with a bracket
            return value
    return value


def load_rows(source: DataSource) -> "datasets.Dataset":
    """All rows of the dataset that a source names.

    Raises:
        DataError: if there is no such file, dataset or split, or it cannot be read.
    """
    import datasets

    if not source.name_or_path:
        raise DataError("A dataset's name_or_path is empty: give a Hub name or a local file.")
    path = Path(source.name_or_path)
    if path.suffix in _LOADERS and (not path.is_file() or path.stat().st_size == 0):
        raise DataError(f"There is no file {path}." if not path.is_file() else f"The file {path} is empty.")
    try:
        if path.suffix in _LOADERS:
            files = glob.escape(str(path))  # otherwise datasets reads [ ] * ? in the name as a pattern
            return datasets.load_dataset(_LOADERS[path.suffix], data_files=files, split="train")
        return datasets.load_dataset(source.name_or_path, split=source.split)
    except (
        datasets.exceptions.DatasetsError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: needs a script
        reason = str(error.__cause__ or error)
        if path.suffix == ".jsonl":
            reason = _broken_line(path) or reason
        if "corresponds to no data" in reason:
            reason = "it holds no rows."
        raise DataError(f"{source.name_or_path} (split {source.split}) cannot be read: {reason}") from error


def _broken_line(path: Path) -> str | None:
    """An error message about the first line that is not a JSON object; None if all are."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                found = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                return f"line {number} is not JSON ({error.msg}): {line.strip()[:60]!r}."
            if not isinstance(found, dict):
                return f"line {number} is no JSON object, but {line.strip()[:60]!r}."
    return None
