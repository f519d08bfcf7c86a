"""Reads local data files. Values stay as the file has them: CSV fields are text, and JSON numbers keep their digits."""

import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classroom_rl.errors import DataError

if TYPE_CHECKING:
    import pyarrow

_BEGINNINGS = {
    b"PK\x03\x04": "a ZIP archive (or an Excel workbook)",
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PAR1": "a Parquet file",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"version https://git-lfs.github.com/": "only a pointer of Git LFS; `git lfs pull` fetches the data",
}
_UTF_16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class Table:
    """The rows of a file, by column.

    Attributes:
        count: the number of rows.
        read: returns the values of a column; None where a row has no value.
    """

    column_names: list[str]
    count: int
    read: Callable[[str], list[Any]]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, column: str) -> list[Any]:
        return self.read(column)


class WrittenNumber(float):
    """A JSON number with a point or an exponent; `str` gives the text of the file, `1.000` for example."""

    def __new__(cls, text: str) -> "WrittenNumber":
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class WrittenList(list):
    """A list of a file. If the file holds it as JSON text, `str` gives that text. Otherwise `str` raises a ValueError,
    because a prompt must not contain Python's notation."""

    text: str | None = None

    def __str__(self) -> str:
        return _text_of(self, "a list", "its entries with for or join")


class WrittenObject(dict):
    """An object of a file; `str` works as for `WrittenList`."""

    text: str | None = None

    def __str__(self) -> str:
        return _text_of(self, "an object", "its values by their names")


def _text_of(value: WrittenList | WrittenObject, kind: str, advice: str) -> str:
    if value.text is None:
        raise ValueError(f"{kind}, {repr(value)[:60]}, has no form as text: write {advice}")
    return value.text


# Values --------------------------------------------------------------------------------------------------------------


def as_text(value: Any, where: str) -> str | None:
    """A cell as text; None stays None.

    Args:
        where: file, row and column, for the error message.

    Raises:
        DataError: if it has no single form as text: a list, an object, a date or time, bytes, NaN.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _checked_text(value, where)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | WrittenNumber):
        return str(value)
    if isinstance(value, Decimal) and value.is_finite():
        return format(value, "f")
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    raise DataError(
        f"{where} holds {_kind(value)}, {_short(value)}, and text is wanted. Text, numbers, true and false can be read "
        "as text; write anything else as text in the file."
    )


def as_cell(value: Any, where: str) -> Any:
    """A cell for a template. Lists and objects keep their structure; every value in them must have a form as text.
    Raises a `DataError` if a value in it has no form as text."""
    if isinstance(value, dict):
        return WrittenObject({name: as_cell(item, where) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return WrittenList(as_cell(item, where) for item in value)
    as_text(value, where)  # raises if the value has no form as text
    return value


def parsed(text: str, where: str) -> Any:
    """The list or object that a text holds as JSON; the text itself if it holds none."""
    if text[:1] not in ("[", "{"):
        return text
    try:
        value = _from_json(text)
    except (ValueError, RecursionError):  # plain text that begins with a bracket
        return text
    cell = as_cell(value, where)
    cell.text = text
    return cell


def _checked_text(text: str, where: str) -> str:
    if "\0" in text:
        raise DataError(f"{where} holds a NUL character, {_short(text)}. Remove it, or save the file as UTF-8.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds a lone surrogate, {_short(text)}, which is no character.") from error
    return text


def _kind(value: Any) -> str:
    kinds = {
        "a list": list | tuple,
        "an object": dict,
        "bytes": bytes | bytearray,
        "a date or time": date | time | timedelta,
        "no finite number": float | Decimal,
    }
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), f"a {type(value).__name__}")


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes | bytearray | list | dict | tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


# Files ---------------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> Table:
    """The rows of a local JSONL, JSON, CSV or Parquet file, by its suffix. Raises a `DataError` if it is missing, has
    another format, or has no rows; for text files, the message names the line."""
    if not os.path.isfile(path):  # Path.is_file would raise an error for a name that is too long
        raise DataError(f"{path} is a folder, not a file." if os.path.isdir(path) else f"There is no file {path}.")
    suffix = path.suffix.lower()
    try:
        _check_beginning(path, suffix)
        table = READERS[suffix](path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}): save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not len(table):
        raise DataError(f"{path} cannot be read: it holds no rows.")
    duplicates = sorted({name for name in table.column_names if name and table.column_names.count(name) > 1})
    if duplicates:
        raise DataError(f"{path} has two columns named {', '.join(duplicates)}: give each its own name.")
    return table


def _check_beginning(path: Path, suffix: str) -> None:
    with path.open("rb") as file:
        beginning = file.read(64)
    if not beginning:
        raise DataError(f"The file {path} is empty.")
    kind = next((kind for magic, kind in _BEGINNINGS.items() if beginning.startswith(magic)), None)
    if kind is not None and not (suffix == ".parquet" and kind == _BEGINNINGS[b"PAR1"]):
        raise DataError(
            f"{path} is not what its name says: it is {kind}. Give a plain {suffix} file, or name "
            "this one by what it is."
        )
    if suffix != ".parquet" and (beginning.startswith(_UTF_16_OR_32) or b"\0" in beginning):
        raise DataError(f"{path} is not UTF-8: it has NUL bytes or a mark of UTF-16. Save it as UTF-8.")


def _read_csv(path: Path) -> Table:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next((row for row in reader if row), [])
            _check_header(path, header)
            rows, line_before = [], reader.line_num
            for row in reader:
                if row and len(row) != len(header):
                    lines = _lines(line_before + 1, reader.line_num)  # a quoted field may hold line breaks
                    raise DataError(f"{path}: {lines}: {len(row)} fields, but the header has {len(header)}. {_QUOTING}")
                line_before = reader.line_num
                rows += [row] if row else []
        except csv.Error as error:
            raise DataError(f"{path} cannot be read: line {reader.line_num}: {error}. {_QUOTING}") from error
    return Table(header, len(rows), lambda name: [row[header.index(name)] for row in rows])


_QUOTING = 'Put a field with commas, quotes or line breaks in double quotes, and write a quote in it twice: "".'


def _lines(first: int, last: int) -> str:
    return f"line {last}" if first >= last else f"lines {first} to {last}"


def _check_header(path: Path, header: list[str]) -> None:
    separators = _OTHER_SEPARATORS.items() if len(header) == 1 else ()
    separator = next((name for character, name in separators if character in header[0]), None)
    if separator is not None:
        raise DataError(
            f"{path}: the header {header[0][:60]!r} has no commas, but {separator}: save the file with commas between "
            "its columns."
        )
    if not any(name.strip() for name in header):
        raise DataError(f"{path} has no header: its first line must name the columns.")


def _read_json(path: Path) -> Table:
    rows = _json_rows(path)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Table(names, len(rows), lambda name: [row.get(name) for row in rows])


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """One JSON object per line, or a list of objects, or one object, whatever the suffix."""
    text = path.read_text(encoding="utf-8-sig")
    first, _, rest = text.lstrip().partition("\n")
    if first.startswith("[") and (not rest.strip() or not _is_json(first)):
        return [_object(path, f"entry {number}", entry) for number, entry in enumerate(_loads(path, text), start=1)]
    if path.suffix.lower() == ".json" and first.startswith("{") and not _is_json(first):
        return [_object(path, "the file", _loads(path, text))]
    rows = []
    for number, line in enumerate(io.StringIO(text), start=1):
        if line.strip():
            rows.append(_object(path, f"line {number}", _loads(path, line, number)))
    return rows


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _loads(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return _from_json(text)
    except (ValueError, RecursionError) as error:
        number = line or getattr(error, "lineno", None)
        excerpt = text.split("\n")[0 if line else (number or 1) - 1].strip()[:60]
        reason = "it nests too deep" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
        location = "it" if number is None else f"line {number}"
        raise DataError(f"{path} cannot be read: {location} is not JSON ({reason}): {excerpt!r}.") from error


def _from_json(text: str) -> Any:
    return json.loads(
        text,
        parse_float=WrittenNumber,
        parse_int=lambda digits: WrittenNumber(digits) if digits == "-0" else int(digits),  # int drops the sign of -0
        parse_constant=_refuse_constant,
        object_pairs_hook=_without_duplicates,
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return value


def _object(path: Path, location: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        excerpt = json.dumps(value, ensure_ascii=False, default=str)[:60]
        raise DataError(f"{path} cannot be read: {location} is no JSON object, but {excerpt!r}.")
    return value


def _read_parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:  # not read_table: it would add columns for parent folders that are named like key=value
        table = pyarrow.parquet.ParquetFile(path).read()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read: {error}") from error

    def values(name: str) -> list[Any]:
        column = table.column(name)
        try:
            return _python_values(column)
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # a date of the year 20000, for example
            raise DataError(f"{path}: column {name}, of type {column.type}, cannot be read: {error}") from error

    return Table(table.column_names, len(table), values)


def _python_values(column: "pyarrow.ChunkedArray") -> list[Any]:
    import pyarrow

    if pyarrow.types.is_float16(column.type) or pyarrow.types.is_float32(column.type):
        # By way of text, because as a Python float, a float32 of 0.1 would become 0.10000000149011612.
        texts = column.cast(pyarrow.float32()).cast(pyarrow.string())
        return [None if text is None else float(text) for text in texts.to_pylist()]
    return column.to_pylist()


READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
"""Maps a suffix to the function that reads such files."""
