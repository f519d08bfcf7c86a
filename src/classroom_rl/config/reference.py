"""Writes the page of all configuration keys: python -m classroom_rl.config.reference docs/keys.md (`make docs`).

Values, defaults and meanings come from the schema. A group of keys that stands in several places has one table.
"""

import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from inspect import getdoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.fields import IsPath, Range, descriptions_of, group_in, metadata_of, types_of
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig

_PROGRAMS = {
    "vllm_server.py, train_rl.py": TrainRLConfig,
    "eval.py": EvalConfig,
    "train_sft.py": TrainSFTConfig,
}
_TOP = "the top level"
_INTRODUCTION = """# All configuration keys

Made from the schema by `make docs`. Defaults are those of a configuration that leaves the key out; the shipped YAMLs in
`config/` set many of them. How to set a key: [configure.md](configure.md). Keys of PedagogicalRL and what became of
them: [config_keys.md](config_keys.md). An environment of your own adds keys to `generation`:
[environments.md](environments.md).
"""


def page() -> str:
    """The page as Markdown."""
    places: dict[type, list[str]] = {}
    for program, schema in _PROGRAMS.items():
        for group, place in _groups(schema, ""):
            places.setdefault(group, []).append(f"`{place}`" if place else f"{_TOP} ({program})")
    return "\n".join([_INTRODUCTION, *(_section(group, where) for group, where in places.items())])


def _groups(schema: type, prefix: str) -> Iterator[tuple[type, str]]:
    """Every group of keys in a schema, and its dotted key."""
    yield schema, prefix
    for name, kind in types_of(schema).items():
        group = group_in(kind)
        if group is not None:
            yield from _groups(group, f"{prefix}.{name}{'[]' if get_origin(kind) is list else ''}".lstrip("."))


def _section(group: type, places: list[str]) -> str:
    descriptions = descriptions_of(group)
    rows = [
        f"| `{item.name}` | {values(kind)} | {_default(item)} | {_cell(descriptions.get(item.name, ''))} |"
        for item in fields(group)
        if group_in(kind := types_of(group)[item.name]) is None
    ]
    table = ["| key | values | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([f"## {', '.join(dict.fromkeys(places))}\n", f"{getdoc(group)}\n", *table, ""])


def values(kind: Any) -> str:
    """What a value of a type may be, in words."""
    if get_origin(kind) in (Union, UnionType):
        return ", or ".join("null" if member is NoneType else values(member) for member in get_args(kind))
    if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) is not None:  # of a mapping or a list
        return values(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is list:
        return f"a list; each: {values(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a mapping of names; each: {values(get_args(kind)[1])}"
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    words = {int: "a whole number", float: "a number", bool: "`true`, `false`", str: "a text"}.get(
        base, "see the meaning"
    )
    if any(isinstance(mark, IsPath) for mark in metadata_of(kind)):
        return "a path or name"
    rules = [mark.rule.removeprefix("it ") for mark in metadata_of(kind) if isinstance(mark, Range)]
    return f"{words}; {'; '.join(rules)}" if rules else words


def _default(item: Any) -> str:
    value = item.default if item.default_factory is MISSING else item.default_factory()
    if len(str(value)) > 60:
        return "see the schema"
    written = str(value).lower() if isinstance(value, bool) else "null" if value is None else value
    return "" if value == "" else f"`{written}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
