"""Files of rollouts: what is read is what was written, and what cannot be read or written is refused."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from classroom_rl import Rollout, RolloutSet, Step
from classroom_rl.errors import DataError, StorageError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.step import End, Settings
from classroom_rl.rollout.store.set_files import SCHEMA_VERSION, columns
from classroom_rl.rollout.tools.tool import ToolCall
from tests.support.played_rollouts import SETTINGS, made

SUFFIXES = [".jsonl", ".parquet"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.integers(0, 2**31 - 1)
SEEDS = st.integers(0, 2**32 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
META = st.dictionaries(TEXT, JSON, max_size=3)
MESSAGES = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), TEXT),
    max_size=3,
)
CALLS = st.builds(
    ToolCall, TEXT, TEXT, META, TEXT, TEXT, st.none() | TEXT, FLOATS, st.integers(0, 99), st.integers(0, 9)
)
POLICIES = st.none() | st.builds(PolicyVersion, TEXT, st.integers(0, 10**6))


TOKENS = st.lists(st.tuples(IDS, st.integers(0, 1), FLOATS), max_size=4)


@st.composite
def steps(draw: st.DrawFn, index: int, before: Step | None) -> Step:
    """A step; its messages and prompt often continue those of the step before."""
    messages, prompt_ids = draw(MESSAGES), draw(st.lists(IDS, max_size=4))
    if before is not None and draw(st.booleans()):
        messages = [*before.messages[: draw(st.integers(0, len(before.messages)))], *messages]
        ids_before = before.prompt_ids + before.ids
        prompt_ids = [*ids_before[: draw(st.integers(0, len(ids_before)))], *prompt_ids]
    ids, mask, logprobs = zip(*tokens, strict=True) if (tokens := draw(TOKENS)) else ((), (), ())
    step = st.builds(
        Step,
        index=st.just(index),
        messages=st.just(tuple(messages)),
        prompt_ids=st.just(tuple(prompt_ids)),
        ids=st.just(ids),
        mask=st.just(mask),
        logprobs=st.just(logprobs),
        tokens=st.integers(0, 99),
        policy=POLICIES,
        seed=SEEDS,
        started=FLOATS,
        finished=FLOATS,
        tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    )
    return draw(step)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    played: list[Step] = []
    for index in range(draw(st.integers(0, 3))):
        played.append(draw(steps(index, played[-1] if played else None)))
    rollout = st.builds(
        Rollout,
        prompt_index=st.integers(0, 99),
        copy=st.integers(0, 9),
        seed=SEEDS,
        opening=MESSAGES.map(tuple),
        settings=st.sampled_from([SETTINGS, replace(SETTINGS, engine="", temperature=0.1 + 0.2)]),
        meta=META,
        notes=META,
        steps=st.just(tuple(played)),
        end=st.none() | st.builds(End),
        unanswered=st.none() | TEXT,
        step_rewards=st.lists(st.none() | FLOATS, max_size=3).map(tuple),
        reward=st.none() | FLOATS,
    )
    return draw(rollout)


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(recorded=st.lists(rollouts(), max_size=3))
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_what_is_loaded_is_what_was_saved(suffix: str, recorded: list[Rollout], tmp_path_factory) -> None:
    path = tmp_path_factory.getbasetemp() / f"set{suffix}"
    saved = RolloutSet(recorded)
    assert saved.save(path) == path
    loaded = RolloutSet.load(path)
    assert loaded == saved
    assert repr(list(loaded)) == repr(list(saved)), "1 and 1.0 are equal, but written differently"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_thousand_rollouts_come_back_equal(suffix: str, tmp_path: Path) -> None:
    many = RolloutSet(made(number, reward=number / 7, length=1 + number % 5) for number in range(1000))
    assert RolloutSet.load(many.save(tmp_path / f"many{suffix}")) == many


def test_the_columns_are_the_fields() -> None:
    schema = columns()
    assert schema.names == [field.name for field in fields(Rollout)]
    step = schema.field("steps").type.value_type
    names = {step.field(index).name for index in range(step.num_fields)}
    assert names == {field.name for field in fields(Step)} | {"messages_kept", "prompt_ids_kept"}
    settings_type = schema.field("settings").type
    assert [settings_type.field(index).name for index in range(settings_type.num_fields)] == [
        field.name for field in fields(Settings)
    ]


def test_a_file_grows_with_the_length_of_rollouts_and_not_with_its_square(tmp_path: Path) -> None:
    sizes = [
        RolloutSet([made(0, length=length)]).save(tmp_path / f"{length}.jsonl").stat().st_size for length in (50, 100)
    ]
    assert sizes[1] < 2.2 * sizes[0]


# Files that cannot be read or written --------------------------------------------------------------------------------


def with_header(path: Path, **changes: object) -> None:
    if path.suffix == ".jsonl":
        head, *lines = path.read_text(encoding="utf-8").split("\n")
        path.write_text("\n".join([json.dumps(json.loads(head) | changes), *lines]), encoding="utf-8")
    else:
        table = pq.read_table(path)
        header = json.loads(table.schema.metadata[b"rollouts"]) | changes
        pq.write_table(table.replace_schema_metadata({"rollouts": json.dumps(header)}), path)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def cut_between_lines(path: Path) -> None:
    path.write_text(path.read_text(encoding="utf-8").splitlines(keepends=True)[0], encoding="utf-8")


def without_a_field(path: Path) -> None:
    head, first, second, third = path.read_text(encoding="utf-8").strip().split("\n")
    row = json.loads(second)
    del row["first_prompt"]
    path.write_text("\n".join([head, first, json.dumps(row), third]), encoding="utf-8")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: with_header(path, schema_version=SCHEMA_VERSION + 1), "set.* schema version 2 .* up to 1"),
        (lambda path: with_header(path, format="recipes"), "is no file of rollouts"),
        (cut_off, "set.* is damaged"),
        (Path.unlink, "no file"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, suffix: str, change, words: str) -> None:
    path = RolloutSet(map(made, range(3))).save(tmp_path / f"set{suffix}")
    change(path)
    with pytest.raises(DataError, match=words):
        RolloutSet.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut_between_lines, "0 of 3 rollouts"),
        (lambda path: path.write_text(""), "is empty"),
        (without_a_field, "(?s)rollout 1 cannot be read.*first_prompt"),
    ],
)
def test_lines_that_are_missing_or_incomplete_are_refused(tmp_path: Path, change, words: str) -> None:
    path = RolloutSet(map(made, range(3))).save(tmp_path / "set.jsonl")
    change(path)
    with pytest.raises(DataError, match=words):
        RolloutSet.load(path)


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="is no file of rollouts"):
        RolloutSet.load(tmp_path / "a.parquet")


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'\.pkl'; rollouts are kept as \.jsonl or \.parquet"):
        RolloutSet().save(tmp_path / "a.pkl")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": float("nan")}, "reward of rollout 0-0 is nan"),
        ({"step_rewards": (float("inf"), None)}, "step reward of rollout 0-0 is inf"),
        ({"meta": {"score": float("nan")}}, "meta of rollout 0-0 cannot be saved"),
        ({"meta": {"pair": (1, 2)}}, "would come back changed"),
        ({"notes": {1: "a"}}, "notes of rollout 0-0 .* come back changed"),
        ({"notes": {"board": object()}}, "notes of rollout 0-0 cannot be saved"),
        ({"meta": {"text": "\ud800"}}, "cannot be saved"),
        ({"first_prompt": "\ud800"}, "surrogate"),
    ],
)
def test_what_no_file_can_hold_is_refused_and_the_old_file_stays(
    suffix: str, changes: dict, words: str, tmp_path: Path
) -> None:
    path = tmp_path / f"set{suffix}"
    old = RolloutSet([made(1)])
    old.save(path)
    with pytest.raises(DataError, match=words):
        RolloutSet([replace(made(0), **changes)]).save(path)
    assert RolloutSet.load(path) == old and [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_log_prob_that_is_nan_is_refused(tmp_path: Path) -> None:
    one = made(0)
    bad = replace(one, steps=(one.steps[0], replace(one.steps[1], logprobs=(-1.0, float("nan"), -1.0))))
    with pytest.raises(DataError, match="log-prob of step 1 of rollout 0-0 is nan"):
        RolloutSet([bad]).save(tmp_path / "a.parquet")


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(StorageError, match="a.jsonl"):
        RolloutSet([made(0)]).save(tmp_path / "a.jsonl")
