"""Reads datasets and turns their rows into problems."""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Union

from pydantic import TypeAdapter, ValidationError

from classroom_rl.errors import DataError
from classroom_rl.rollout.data_files import READERS, Table, as_cell, as_text, parsed, read_file
from classroom_rl.rollout.problem import PostTestMaterial, Problem
from classroom_rl.rollout.prompts import render, variables_of

if TYPE_CHECKING:
    import datasets


class DataSource(Protocol):
    """One dataset: a Hub name or a local file, its split, and the share of its rows to take, in (0, 1]."""

    name_or_path: str
    split: str
    ratio: float


class DatasetSource(DataSource, Protocol):
    """A dataset of problems; fields as in `classroom_rl.config.base.DatasetSource`."""

    problem_column: str
    answer_column: str | None
    problem_template: str | None
    columns: dict[str, str]
    sibling_problems_column: str | None
    steps_column: str | None


Source = TypeVar("Source", bound=DataSource)
Row = TypeVar("Row")
Rows = Union[Table, "datasets.Dataset"]
_MATERIAL = TypeAdapter(PostTestMaterial)


def load_problems(sources: Sequence[DatasetSource], limit: int = -1, seed: int | None = None) -> list[Problem]:
    """Load the problems of all sources; see `gather`. Raises a `DataError` if there is no source, a column is missing,
    a cell is empty, a row cannot be filled into its template, or nothing is left."""
    return gather(sources, _read_problems, limit, seed)


def gather(
    sources: Sequence[Source], read: Callable[[Source], list[Row]], limit: int = -1, seed: int | None = None
) -> list[Row]:
    """The rows that `read` returns for all sources. Each source is subsampled to its `ratio`, then all rows are
    shuffled with `seed` (None: not shuffled) and cut to `limit` (−1: all). Raises a `DataError` if there is no source,
    a ratio is out of range, or nothing is left."""
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
    rows = read(source)
    if source.ratio < 1:
        count = round(len(rows) * source.ratio)
        rows = random.Random(f"ratio|{seed}|{source.name_or_path}").sample(rows, count)
    return rows


def _read_problems(source: DatasetSource) -> list[Problem]:
    rows = load_rows(source)
    columns = _text_columns(source)
    required = [*columns.values(), source.answer_column, source.sibling_problems_column, source.steps_column]
    missing = [column for column in required if column not in (None, *rows.column_names)]
    if missing:
        renaming = "columns={variable: column}" if source.problem_template else "problem_column"
        raise DataError(
            f"{source.name_or_path} has no column {', '.join(missing)}. It has: {', '.join(rows.column_names)}. "
            f"Name yours with {renaming} and answer_column (null: the problems have no answer); leave out "
            "sibling_problems_column and steps_column where there are none."
        )
    has_template = source.problem_template is not None
    texts = _fill_in(source, rows, columns) if has_template else _texts(source, rows, source.problem_column)
    answers = _texts(source, rows, source.answer_column) if source.answer_column else [None] * len(rows)
    return list(_to_problems(source, texts, answers, _material(source, rows)))


def _texts(source: DataSource, rows: Rows, column: str) -> Iterator[str | None]:
    for number, value in enumerate(rows[column], start=1):
        yield as_text(value, _location(source, number, column))


def _location(source: DataSource, row: int, column: str) -> str:
    return f"{source.name_or_path}: row {row}, column {column}"


def _text_columns(source: DatasetSource) -> dict[str, str]:
    """Map each template variable to its column; without a template, `problem` to the column of the text."""
    if source.problem_template is None:
        return {"problem": source.problem_column}
    variables = sorted(variables_of(source.problem_template))
    unused = sorted(set(source.columns) - set(variables))
    if unused:
        raise DataError(
            f"{source.name_or_path}: columns maps {', '.join(unused)}, but {source.problem_template} uses: "
            f"{', '.join(variables)}."
        )
    return {variable: source.columns.get(variable, variable) for variable in variables}


def _to_problems(source: DatasetSource, texts: Iterable, answers: Iterable, material: Iterable) -> Iterator[Problem]:
    for number, (text, answer, row_material) in enumerate(zip(texts, answers, material, strict=True), start=1):
        if text is None or not text.strip():
            raise DataError(f"{source.name_or_path}: row {number} has no text in column {source.problem_column}.")
        yield Problem.of(text, answer or "", row_material)


def _material(source: DatasetSource, rows: Rows) -> Iterator[PostTestMaterial]:
    """The material for post-tests of each row, from the columns that the source names for it."""
    columns = {"siblings": source.sibling_problems_column, "steps": source.steps_column}
    columns = {name: column for name, column in columns.items() if column is not None}
    if not columns:
        yield from [PostTestMaterial()] * len(rows)
        return
    for number, row in enumerate(_cells(source, rows, columns), start=1):
        cells = {name: _as_material(cell) for name, cell in row.items()}
        try:
            # A CSV file cannot leave a field out of a row: an empty one means that there is none.
            yield _MATERIAL.validate_python({name: cell for name, cell in cells.items() if cell not in (None, "")})
        except ValidationError as error:
            first = error.errors()[0]
            raise DataError(
                f"{source.name_or_path}: row {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}. In "
                "sibling_problems_column holds lists of {problem, answer, steps}, steps_column lists of {name, value}."
            ) from error


def _as_material(value: Any) -> Any:
    """JSON data with its decimal numbers as text, and without nulls: a table holds one where an object lacks a field
    that another object has."""
    if isinstance(value, dict):
        return {name: _as_material(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_as_material(item) for item in value]
    return str(value) if isinstance(value, float) else value


def _fill_in(source: DatasetSource, rows: Rows, columns: dict[str, str]) -> Iterator[str]:
    for number, values in enumerate(_cells(source, rows, columns), start=1):
        empty = [columns[variable] for variable, value in values.items() if value in (None, "", [], {})]
        if empty:
            raise DataError(f"{source.name_or_path}: row {number} has nothing in column {', '.join(empty)}.")
        try:
            yield render(source.problem_template, **values)
        except DataError as error:
            raise DataError(f"{source.name_or_path}: row {number}: {error}") from error


def _cells(source: DataSource, rows: Rows, columns: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The cells of each row in these columns, by variable."""
    numbers, values = range(1, len(rows) + 1), [rows[column] for column in columns.values()]
    for number, *row in zip(numbers, *values, strict=True):
        cells = zip(columns.items(), row, strict=True)
        yield {name: cell_value(cell, _location(source, number, column)) for (name, column), cell in cells}


def cell_value(value: Any, where: str) -> Any:
    """The value of a cell; a list or an object that is written as JSON text, as in CSV files, is parsed.

    Args:
        where: file, row and column, for the error message.

    Raises:
        DataError: if something in it has no form as text.
    """
    cell = as_cell(value, where)
    return parsed(cell.strip(), where) if isinstance(cell, str) else cell


def load_rows(source: DataSource) -> Rows:
    """Load all rows of a dataset, from a local file or from the Hub. Raises a `DataError` if there is no such file,
    dataset or split, or it cannot be read."""
    if not source.name_or_path:
        raise DataError("A dataset's name_or_path is empty: give a Hub name or a local file.")
    path = Path(source.name_or_path)
    if is_local_name(path):
        return read_file(path)
    if os.path.isfile(path):
        raise DataError(f"{path} is a file of a kind that is not read. Data files are {', '.join(READERS)}.")
    return load_from_hub(source.name_or_path, source.split)


def is_local_name(path: Path) -> bool:
    """Whether a dataset's name is that of a local file, by its suffix; otherwise it is a Hub name."""
    return path.suffix.lower() in READERS


def load_from_hub(name: str, split: str, subset: str | None = None) -> "datasets.Dataset":
    """All rows of a data set on the Hub, or of its folder on this machine. Raises a `DataError` if there is no such
    data set, subset or split, or it cannot be read."""
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split)
    # A RuntimeError says that the dataset needs a loading script.
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = str(error.__cause__ or error)
        raise DataError(f"{name} (split {split}) cannot be read: {reason}") from error
    # An image stays as bytes: no reader wants it as a picture, which would need Pillow.
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(column, datasets.Image(decode=False))
    return rows
