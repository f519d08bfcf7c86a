"""The types of configuration keys: what a number, a share or a path may be, and how a value becomes one.

A schema is a pydantic dataclass whose fields have these types. Below each field is a docstring, which `make docs` puts
into docs/keys.md (left out here):

    @config_group
    class VllmConfig:
        max_num_seqs: Count = 256
        top_p: Annotated[Number, Range(0, 1, "it is above 0 and at most 1", open_below=True)] = 1.0

Where no rule sets the upper end of a number there is a sanity limit: larger than any run needs, and small enough for
the libraries. Rules between several keys are in `config/checks.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, dataclass_transform, get_args, get_type_hints

from pydantic import BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import CoreSchema, core_schema

from classroom_rl.system.functions import is_function

LARGEST_SEED = 2**32 - 1  # numpy's limit
_COUNT, _TOKENS, _STEPS = 10**6, 10**8, 10**9
_SECONDS = 10**7
"""About four months; no timer overflows with it."""
LARGEST_NUMBER = 10**15
"""Of keys that have no range of their own, such as a mapping of weights."""
_WORDS = {"true": True, "yes": True, "on": True, "y": True, "false": False, "no": False, "off": False, "n": False}


@dataclass_transform()
def config_group(cls: type) -> type:
    """Makes a pydantic dataclass of a group of keys. Unknown keys are refused, and what is written to a field later is
    not checked again."""
    return pydantic_dataclass(cls, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))


def _whole_number(value: Any) -> int:
    """An integer, or a text of one, as an environment variable holds it."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("it must be a whole number")
    try:
        return int(value)
    except ValueError as error:
        raise ValueError("it must be a whole number") from error


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("it must be a number")
    try:
        return float(value)
    except (ValueError, OverflowError) as error:
        raise ValueError("it must be a number") from error


def _flag(value: Any) -> bool:
    """A truth value, a word for one, or a number: 0 is false."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        return bool(_whole_number(value))
    except ValueError as error:
        raise ValueError("it must be true or false") from error


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise ValueError("it must be a text")
    return str(value)


Whole = Annotated[int, BeforeValidator(_whole_number)]
Number = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]


@dataclass(frozen=True)
class Range:
    """The allowed values of a number, as an annotation of its type.

    Attributes:
        least, most: the ends, both allowed unless `open_below` or `open_above` excludes one.
        rule: the range in words, without the upper end if that is a sanity limit.
        sanity_limit: whether `most` is a sanity limit.
        also: one more allowed number, outside the range, with a meaning of its own.
    """

    least: float
    most: float
    rule: str
    sanity_limit: bool = False
    open_below: bool = False
    open_above: bool = False
    also: float | None = None

    def check(self, value: float) -> float:
        """The number. Raises a `ValueError` with the rule, if it is not allowed; nan and infinity never are."""
        if value == self.also:
            return value
        above = value > self.least if self.open_below else value >= self.least
        if above and (value < self.most if self.open_above else value <= self.most):
            return value
        if self.sanity_limit and isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self.rule}, and finite")
        raise ValueError(f"it must be at most {self.most}" if self.sanity_limit and value > self.most else self.rule)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


def at_least(least: float, most: float, rule: str | None = None, also: float | None = None) -> Range:
    """`least` or more; `most` is a sanity limit."""
    return Range(least, most, rule or f"it must be at least {least}", sanity_limit=True, also=also)


def above(least: float, most: float) -> Range:
    """More than `least`; `most` is a sanity limit."""
    return Range(least, most, f"it must be above {least}", sanity_limit=True, open_below=True)


def between(least: float, most: float) -> Range:
    """From `least` to `most`, both allowed."""
    return Range(least, most, f"it must be from {least} to {most}")


Count = Annotated[Whole, at_least(1, _COUNT)]
CountFromZero = Annotated[Whole, at_least(0, _COUNT)]
Tokens = Annotated[Whole, at_least(1, _TOKENS)]
ContextLength = Annotated[Whole, at_least(2, _TOKENS)]
"""Tokens of a context: at least one that is read and one that is written."""
Steps = Annotated[Whole, at_least(0, _STEPS)]
Interval = Annotated[Whole, at_least(1, _STEPS)]
"""Steps from one time to the next."""
MaxSteps = Annotated[Whole, at_least(0, _STEPS, "it must be at least 1, or -1 to count epochs", also=-1)]
Examples = Annotated[Whole, at_least(1, _COUNT * 1000, "it must be at least 1, or -1 for all", also=-1)]
Seed = Annotated[Whole, between(0, LARGEST_SEED)]
Share = Annotated[Number, between(0, 1)]
SomeShare = Annotated[Number, Range(0, 1, "it is a share above 0 and at most 1", open_below=True)]
Seconds = Annotated[Number, above(0, _SECONDS)]
LearningRate = Annotated[Number, at_least(0, 1000)]
Weight = Annotated[Number, at_least(0, _COUNT)]
Positive = Annotated[Number, above(0, _COUNT)]
Finite = Annotated[Number, Range(-math.inf, math.inf, "it must be a finite number", open_below=True, open_above=True)]


@dataclass(frozen=True)
class IsPath:
    """Marks a text as a path: its `~` is expanded, and it may name a shipped file. `is_model` is one of a folder whose
    files vLLM, DeepSpeed or transformers look for by a pattern."""

    is_model: bool = False


@dataclass(frozen=True)
class NameOrFunction:
    """Marks a text as one of some names, or as that of a function of one's own, `package.module:function`."""

    names: tuple[str, ...]

    def check(self, value: str) -> str:
        """The name. Raises a `ValueError` with the names, if it has neither form."""
        if value in self.names or is_function(value):
            return value
        raise ValueError(f"it must be one of {', '.join(self.names)}, or a function as package.module:function")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


FilePath = Annotated[Text, IsPath()]
ModelPath = Annotated[Text, IsPath(is_model=True)]


class Merges:
    """Marks a mapping whose names keep their default if a configuration leaves them out. Any other mapping replaces its
    default (config/mappings.py)."""


def metadata_of(annotation: Any) -> Iterator[Any]:
    """What a type is annotated with, inside of lists, mappings and unions, too."""
    yield from getattr(annotation, "__metadata__", ())
    for inner in get_args(annotation):
        yield from metadata_of(inner)


def group_in(annotation: Any) -> type | None:
    """The group of keys that a field holds, or that each entry of its list is."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation
    return next(filter(None, map(group_in, get_args(annotation))), None)


@cache
def types_of(group: type) -> dict[str, Any]:
    """The type of each key of a group, with its annotations."""
    hints = get_type_hints(group, include_extras=True)
    return {item.name: hints[item.name] for item in fields(group)}


def descriptions_of(group: type) -> dict[str, str]:
    """The docstring of each key of a group that has one; pydantic knows those of a class's own keys only."""
    fields_of_classes = [getattr(base, "__pydantic_fields__", {}) for base in reversed(group.__mro__)]
    return {name: item.description for items in fields_of_classes for name, item in items.items() if item.description}


def values_of(config: Any, prefix: str = "") -> Iterator[tuple[Any, str, str]]:
    """(group, name, dotted key) of every value of a configuration that is not a group of keys; `[2]` is an index in a
    list of groups."""
    for item in fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from values_of(value, f"{key}.")
        elif isinstance(value, list) and value and all(map(is_dataclass, value)):
            for index, entry in enumerate(value):
                yield from values_of(entry, f"{key}[{index}].")
        else:
            yield config, item.name, key
