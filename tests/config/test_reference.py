"""docs/keys.md says of every configuration key what it may be, its default, and what it means."""

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.fields import descriptions_of, group_in, types_of
from classroom_rl.config.load import ROOT
from classroom_rl.config.reference import page
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig
from classroom_rl.config.validate import config_keys
from classroom_rl.environments.marooned.config import Generation as MaroonedGeneration

PROGRAMS = {"vllm_server.py, train_rl.py": TrainRLConfig, "eval.py": EvalConfig, "train_sft.py": TrainSFTConfig}
PAGE = (ROOT / "docs/keys.md").read_text(encoding="utf-8")
_TITLE = re.compile(r"(?:`(?P<key>[\w.\[\]]+)`|the top level)(?: \((?P<program>[^)]*)\))?(?:, |$)")


def groups(schema: type) -> Iterator[type]:
    yield schema
    for kind in types_of(schema).values():
        group = group_in(kind)
        if group is not None:
            yield from groups(group)


ALL_GROUPS = sorted({each for schema in (*PROGRAMS.values(), MaroonedGeneration) for each in groups(schema)}, key=str)


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
    assert not [each for each, count in rows.items() if count > 1]
    assert headings | set(rows) == {
        (program, key) for program, schema in PROGRAMS.items() for key in config_keys(schema)
    }


def cells(heading: str, key: str) -> list[str]:
    """Values and default of a key."""
    return next(rows[key][:2] for found, rows in sections() if found.startswith(heading) and key in rows)


@pytest.mark.parametrize(
    ("heading", "key", "values", "default"),
    [
        ("the top level (vllm_server.py", "skip_first_samples", "a whole number, at least 0", "`0`"),
        ("the top level (vllm_server.py", "dry_run", "`true`, `false`", "`false`"),
        ("the top level (vllm_server.py", "supervisor_model", "a group of keys; or null", "`null`"),
        ("the top level (eval.py", "tutors", "a list; each: a group of keys", "`[]`"),
        ("the top level (eval.py", "samplings", "a list; each: a text", "`[sampled, greedy]`"),
        ("`train` (vllm_server.py", "algorithm", "`grpo`, `ppo`", "`grpo`"),
        (
            *("`train` (vllm_server.py", "loss_type"),
            "`grpo`, `bnpo`, `dr_grpo`, `dapo`, `cispo`, `sapo`; or `package.module:function`",
            "`dapo`",
        ),
        ("`train` (vllm_server.py", "learning_rate", "a number, at least 0", "`5e-07`"),
        ("`train` (vllm_server.py", "max_staleness", "a whole number, from 0 to 1", "`0`"),
        ("`train` (vllm_server.py", "epsilon_high", "a number, above 0; or null", "`null`"),
        ("`train` (vllm_server.py", "reward_weights", "a mapping of names; each: a number; or null", "`null`"),
        ("`teacher_model.vllm`", "top_k", "a whole number, at least 1, or -1 for no limit", "`-1`"),
        ("`teacher_model.vllm`", "cpu_cores", "a text; or null", "`null`"),
        ("`generation`", "max_turns", "a whole number, it counts messages and must be at least 1", "`15`"),
        ("`generation`", "teacher_prompt_path", "a path or name", "`prompt_templates/quickstart/teacher.txt`"),
        ("`generation`", "readers_path", "a path or name; or null", "`null`"),
        ("`generation` with", "colonists", "a list; each: a text", "`[builder]`"),
        ("`benchmark`", "path", "a path or name", ""),
    ],
)
def test_what_a_key_may_be_and_its_default(heading: str, key: str, values: str, default: str):
    assert cells(heading, key) == [values, default]


def test_a_meaning_is_one_line_and_links_to_the_docs():
    meanings = {key: row[2] for _, rows in sections() for key, row in rows.items()}
    assert meanings["steps_column"].startswith("The column with the quantities on the way to the answer")
    assert "([classroom.md](classroom.md))" in meanings["readers_path"]


def test_defaults_that_differ_between_places_stand_above_the_table():
    assert "Defaults in `model.lora` (train_sft.py): `rank` `256`, `alpha` `512`.\n" in PAGE
    assert "Defaults in `generation` (eval.py): `ignore_rejected_judge` `true`.\n" in PAGE
