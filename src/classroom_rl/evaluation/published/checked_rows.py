"""Reads rows of published benchmarks strictly: an error names the file, the row and the field."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from classroom_rl.errors import DataError
from classroom_rl.judges.moves.labelled import numbered_rows
from classroom_rl.rollout.text import has_surrogates

Row = TypeVar("Row", bound=BaseModel)
Item = TypeVar("Item")


class PublishedRow(BaseModel):
    """A row's fields as published. Fields that are not read may be there; none is converted."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def read_rows(name: str, split: str, *kinds: type[Row]) -> Iterator[tuple[str, Row]]:
    """The rows of a benchmark, each with its place in words, in one of the known forms.

    Args:
        name: a .jsonl or .json file, or a name on the Hub, with its `split`.
        kinds: the forms. A row has the first one whose required fields are all in it.

    Raises:
        DataError: naming file, row and field.
    """
    for where, row in numbered_rows(name, split):
        kind = next((each for each in kinds if _required(each) <= set(row)), None)
        if kind is None:
            forms = "; or ".join(", ".join(sorted(_required(each))) for each in kinds)
            raise DataError(f"{where} has the fields {', '.join(sorted(map(str, row)))[:200]}; it needs {forms}.")
        yield where, checked(kind, where, row)


def checked(kind: type[Row], where: str, row: dict[str, Any]) -> Row:
    """The row as this kind.

    Raises:
        DataError: naming the first field that is wrong.
    """
    try:
        found = kind.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(f"{where}: field {'.'.join(map(str, first['loc']))}: {first['msg']}.") from error
    for field, text in _texts(row):
        if has_surrogates(text):
            raise DataError(f"{where}: field {field} holds half of a character (a lone surrogate).")
    return found


def draw(items: Sequence[Item], group_of: Callable[[Item], str], limit: int, seed: int) -> list[Item]:
    """The items of at most `limit` groups (−1: all), drawn with `seed`; items keep their order. A larger limit draws
    the same groups and more."""
    groups = list(dict.fromkeys(map(group_of, items)))
    Random(f"benchmark|{seed}").shuffle(groups)
    kept = set(groups if limit < 0 else groups[:limit])
    return [item for item in items if group_of(item) in kept]


def digest_of(name: str) -> str | None:
    """The SHA-256 of a local file; None for a name on the Hub or a folder."""
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _required(kind: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items() if field.is_required()}


def _texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(each, f"{field}.{name}".lstrip("."))
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _texts(each, f"{field}.{place}".lstrip("."))
