"""docs/keys.md says of every configuration key what it may be, its default, and what it means."""

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.fields import descriptions_of, group_in, types_of
from classroom_rl.config.load import ROOT
from classroom_rl.config.reference import page
from classroom_rl.config.train_preferences import TrainPreferencesConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig
from classroom_rl.config.validate import config_keys
from classroom_rl.environments.marooned.config import Generation as MaroonedGeneration

PROGRAMS = {
    "vllm_server.py, train_rl.py": TrainRLConfig,
    "eval.py": EvalConfig,
    "train_sft.py": TrainSFTConfig,
    "train_preferences.py": TrainPreferencesConfig,
}
PAGE = (ROOT / "docs/keys.md").read_text(encoding="utf-8")
_TITLE = re.compile(r"(?:`(?P<key>[\w.\[\]]+)`|the top level)(?: \((?P<program>[^)]*)\))?(?:, |$)")


def groups(schema: type) -> Iterator[type]:
    yield schema
    for kind in types_of(schema).values():
        group = group_in(kind)
        if group is not None:
            yield from groups(group)


ALL_GROUPS = sorted({group for schema in (*PROGRAMS.values(), MaroonedGeneration) for group in groups(schema)}, key=str)


@pytest.mark.parametrize("group", ALL_GROUPS, ids=lambda group: group.__name__)
def test_every_key_says_what_it_means(group: type):
    """A group of keys needs no docstring where it stands, unless it may be null or one of many."""
    keys = {name for name, kind in types_of(group).items() if not isinstance(kind, type) or group_in(kind) is None}
    assert keys <= set(descriptions_of(group))
    assert all(text[0].isupper() or text[0] in "`γλ" for text in descriptions_of(group).values())
    assert all(text.endswith(".") for text in descriptions_of(group).values())


def test_the_page_is_made_from_the_schema_of_today():
    assert page() == PAGE, "docs/keys.md is not what the schema says: make docs"


def sections() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """(heading, key: [values, default, meaning])"""
    for section in page().split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
        yield heading, {key.strip("`"): cells for key, *cells in rows}


def places() -> Iterator[tuple[str, str, dict[str, list[str]]]]:
    """(program, dotted key of a group, its rows); a title without a program is of all that have this key."""
    for heading, rows in sections():
        for title in () if "environment: " in heading else _TITLE.finditer(heading):
            key = title["key"] or ""
            for program, schema in PROGRAMS.items():
                has_it = key.removesuffix("[]") in ("", *config_keys(schema))
                if has_it and title["program"] in (None, program):
                    yield program, key, rows


def test_the_page_lists_every_key_of_every_program_once():
    headings = {(program, key.removesuffix("[]")) for program, key, _ in places() if key}
    rows = Counter((program, f"{key}.{name}".lstrip(".")) for program, key, rows in places() for name in rows)
    assert not [key for key, count in rows.items() if count > 1]
    assert headings | set(rows) == {
        (program, key) for program, schema in PROGRAMS.items() for key in config_keys(schema)
    }
