"""Writes the page of all configuration keys: python -m classroom_rl.config.reference docs/keys.md (`make docs`).

Values, defaults and meanings come from the schema. Keys that stand in several places have one table.
"""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from inspect import getdoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.fields import IsPath, NameOrFunction, Range, descriptions_of, group_in, metadata_of, types_of
from classroom_rl.config.train_preferences import TrainPreferencesConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig
from classroom_rl.rollout.environment import ENVIRONMENTS, module_of

_PROGRAMS = {
    "vllm_server.py, train_rl.py": TrainRLConfig,
    "eval.py": EvalConfig,
    "train_sft.py": TrainSFTConfig,
    "train_preferences.py": TrainPreferencesConfig,
}
_CLASSROOM = "classroom"
_OF_DOCS = re.compile(r"\bdocs/(\w+\.md)")
_INTRODUCTION = """# All configuration keys

Made from the schema by `make docs`. Defaults are those of a configuration that leaves the key out; the shipped YAMLs in
`config/` set many of them. How to set a key: [configure.md](configure.md). Keys of PedagogicalRL and what became of
them: [config_keys.md](config_keys.md). An environment of your own adds keys to `generation`:
[environments.md](environments.md).

Dots lead into groups: `temperature` in the table of `teacher_model.vllm` is `teacher_model.vllm.temperature`. `[]`
stands for an entry of a list.
"""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a group of keys stands.

    Attributes:
        key: its dotted key; empty at the top level.
        program: the programs whose configuration it is.
        group: its class.
        default: the group there if a configuration leaves it out; None for the defaults of its class.
    """

    key: str
    program: str
    group: type
    default: Any = None

    @property
    def title(self) -> str:
        return f"`{self.key}`" if self.key else "the top level"


def page() -> str:
    """The page as Markdown."""
    all_places = [place for program, schema in _PROGRAMS.items() for place in _places(Place("", program, schema))]
    owners: dict[tuple[type, tuple[str, ...]], list[Place]] = {}
    for place in all_places:
        for owner in reversed(place.group.__mro__):
            names = _keys(place.group, owner)
            if names or owner is place.group:
                owners.setdefault((owner, names), []).append(place)
    sections: dict[tuple[Place, ...], list[type]] = {}
    for (owner, _), places in owners.items():
        sections.setdefault(tuple(places), []).append(owner)
    texts = [_section(places, classes, all_places) for places, classes in sections.items()]
    texts += [_section_of_environment(name) for name in ENVIRONMENTS if name != _CLASSROOM]
    return _INTRODUCTION + _OF_DOCS.sub(r"[\1](\1)", "\n".join(["", *texts]))


def _places(place: Place) -> Iterator[Place]:
    """A place, and those of all groups below it."""
    yield place
    for item in fields(place.group):
        kind = types_of(place.group)[item.name]
        group = group_in(kind)
        if group is not None:
            key = f"{place.key}.{item.name}{'[]' if get_origin(kind) is list else ''}".lstrip(".")
            value = _default(item) if place.default is None else getattr(place.default, item.name)
            yield from _places(Place(key, place.program, group, value if isinstance(value, group) else None))


def _keys(group: type, owner: type) -> tuple[str, ...]:
    """The keys of a group that a class, of which it inherits, declares. Groups of keys have headings of their own, and
    are left out unless they have a docstring."""
    return tuple(
        name
        for name, kind in types_of(group).items()
        if next(base for base in group.__mro__ if name in base.__dict__.get("__annotations__", {})) is owner
        and (group_in(kind) is None or name in descriptions_of(group))
    )


def _section(places: Sequence[Place], classes: list[type], every: Sequence[Place]) -> str:
    """The keys that classes declare, which stand in the same places."""
    group, last = places[0].group, classes[-1]
    titles = [_title(place, places, every) for place in places]
    parts = [f"## {', '.join(dict.fromkeys(titles))}\n", f"{getdoc(last)}\n"]
    parts += [line for place in places if (line := _other_defaults(place, classes))]
    for owner in classes:
        parts += [] if owner is last else [f"{getdoc(owner)}\n"]
        parts += _table(group, owner)
    return "\n".join(parts)


def _title(place: Place, places: Sequence[Place], every: Sequence[Place]) -> str:
    """A place, with its program if another program has other keys there."""
    is_everywhere = all(other in places for other in every if other.key == place.key)
    return place.title if is_everywhere else f"{place.title} ({place.program})"


def _other_defaults(place: Place, classes: Sequence[type]) -> str:
    """The defaults of a place that are not those of its class."""
    if place.default is None:
        return ""
    names = {name for owner in classes for name in _keys(place.group, owner)}
    class_defaults = {item.name: _default(item) for item in fields(place.group) if item.name in names}
    place_defaults = {name: getattr(place.default, name) for name in class_defaults}
    differences = [
        f"`{name}` {_written(value)}" for name, value in place_defaults.items() if value != class_defaults[name]
    ]
    return f"Defaults in {place.title} ({place.program}): {', '.join(differences)}.\n" if differences else ""


def _section_of_environment(name: str) -> str:
    """The keys that an environment adds to those of every environment."""
    group = module_of(name, "config").Generation
    return "\n".join([f"## `generation` with `environment: {name}`\n", f"{getdoc(group)}\n", *_table(group, group)])


def _table(group: type, owner: type) -> list[str]:
    meanings, defaults = descriptions_of(group), {item.name: _written(_default(item)) for item in fields(group)}
    rows = [
        f"| `{name}` | {values(types_of(group)[name])} | {defaults[name]} | {_cell(meanings.get(name, ''))} |"
        for name in _keys(group, owner)
    ]
    return ["| key | values | default | meaning |", "|---|---|---|---|", *rows, ""] if rows else []


def values(kind: Any) -> str:
    """What a value of a type may be, in words."""
    if get_origin(kind) in (Union, UnionType):
        return "; or ".join("null" if member is NoneType else values(member) for member in get_args(kind))
    if is_dataclass(kind):
        return "a group of keys"
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
    names = [f"`{name}`" for mark in metadata_of(kind) if isinstance(mark, NameOrFunction) for name in mark.names]
    if names:
        return f"{', '.join(names)}; or `package.module:function`"
    ranges = [mark for mark in metadata_of(kind) if isinstance(mark, Range) and mark.least > -math.inf]
    rules = [re.sub("^, it (must be|is) ", ", ", f", {mark.rule}") for mark in ranges]
    return words + "".join(rules)


def _default(item: Field) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _written(value: Any) -> str:
    """A default as a configuration would have it; nothing for an empty text and for a group of keys."""
    if value == "" or is_dataclass(value):
        return ""
    if isinstance(value, list | dict):
        return f"`{yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip()}`"
    return f"`{str(value).lower() if isinstance(value, bool) else 'null' if value is None else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
