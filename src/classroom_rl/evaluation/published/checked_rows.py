"""The rows of published benchmarks: validated strictly, drawn by whole dialogues, and written. An error names the file,
the row and the field."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from classroom_rl.errors import DataError
from classroom_rl.judges.moves.labelled import numbered_rows
from classroom_rl.rollout.text import has_surrogates
from classroom_rl.system.storage import write_whole

Row = TypeVar("Row", bound=BaseModel)
Item = TypeVar("Item")


class PublishedRow(BaseModel):
    """A row's fields as published. Unknown fields are ignored, and no value is converted to another type."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def read_rows(name: str, split: str, *kinds: type[Row]) -> Iterator[tuple[str, Row]]:
    """Read the rows of a benchmark in one of its known forms. Yields (where, row); `where` names the file and the row
    for error messages.

    Args:
        name: a .jsonl or .json file, or a name on the Hub, with its `split`.
        kinds: the forms. A row is read as the first one whose required fields it has.

    Raises:
        DataError: naming file, row and field.
    """
    for where, row in numbered_rows(name, split):
        kind = next((form for form in kinds if _required(form) <= set(row)), None)
        if kind is None:
            forms = "; or ".join(", ".join(sorted(_required(form))) for form in kinds)
            raise DataError(f"{where} has the fields {', '.join(sorted(map(str, row)))[:200]}; it needs {forms}.")
        yield where, checked(kind, where, row)


def checked(kind: type[Row], where: str, row: dict[str, Any]) -> Row:
    """Validate a row as `kind`. Raises `DataError`, naming the first invalid field."""
    try:
        parsed = kind.model_validate(row)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        raise DataError(f"{where}: field {'.'.join(map(str, first_error['loc']))}: {first_error['msg']}.") from error
    for field, text in _texts(row):
        if has_surrogates(text):
            raise DataError(f"{where}: field {field} holds half of a character (a lone surrogate).")
    return parsed


def draw(items: Sequence[Item], group_of: Callable[[Item], str], limit: int, seed: int) -> list[Item]:
    """Draw at most `limit` groups (−1: all) with `seed` and return their items in the original order. A larger limit
    draws the same groups and more."""
    groups = list(dict.fromkeys(map(group_of, items)))
    Random(f"benchmark|{seed}").shuffle(groups)
    drawn_groups = set(groups if limit < 0 else groups[:limit])
    return [item for item in items if group_of(item) in drawn_groups]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines; the file is whole or absent."""
    write_whole(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def digest_of(name: str) -> str | None:
    """The SHA-256 of a local file; None for a name on the Hub or a folder."""
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _required(kind: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items() if field.is_required()}


def _texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """All strings in a nested value, each as (dotted path, text)."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{field}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{field}.{index}".lstrip("."))
