"""Sets of rollouts: files that come back equal, new rewards without an engine, summaries worked out by hand, plots."""

import asyncio
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from classroom_rl import Rollout, RolloutSet, Step
from classroom_rl.errors import ConfigError, DataError, StorageError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.step import End, Settings
from classroom_rl.rollout.store.set_files import SCHEMA_VERSION, columns
from classroom_rl.rollout.tools.tool import ToolCall

SETTINGS = Settings("HfEngine tiny", "without_thinking", 50, 1.0, 0.9, -1, 64)
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


@st.composite
def steps(draw: st.DrawFn, index: int, before: Step | None) -> Step:
    """A step; its messages and prompt often continue those of the step before."""
    ids = draw(st.lists(st.tuples(IDS, st.integers(0, 1), FLOATS), max_size=4))
    messages, prompt_ids = draw(MESSAGES), draw(st.lists(IDS, max_size=4))
    if before is not None and draw(st.booleans()):
        cut = draw(st.integers(0, len(before.messages)))
        messages = [*before.messages[:cut], *messages]
        whole = before.prompt_ids + before.ids
        prompt_ids = [*whole[: draw(st.integers(0, len(whole)))], *prompt_ids]
    return Step(
        index=index,
        prompt=draw(TEXT),
        messages=tuple(messages),
        text=draw(TEXT),
        content=draw(TEXT),
        thought=draw(st.none() | TEXT),
        thought_state=draw(st.sampled_from(["absent", "closed", "opened", "cut"])),
        prompt_ids=tuple(prompt_ids),
        ids=tuple(each for each, _, _ in ids),
        mask=tuple(each for _, each, _ in ids),
        logprobs=tuple(each for _, _, each in ids),
        tokens=draw(st.integers(0, 99)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        policy=draw(POLICIES),
        seed=draw(SEEDS),
        started=draw(FLOATS),
        finished=draw(FLOATS),
        tool_calls=tuple(draw(st.lists(CALLS, max_size=2))),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    found: list[Step] = []
    for index in range(draw(st.integers(0, 3))):
        found.append(draw(steps(index, found[-1] if found else None)))
    return Rollout(
        id=draw(TEXT),
        prompt_index=draw(st.integers(0, 99)),
        copy=draw(st.integers(0, 9)),
        seed=draw(SEEDS),
        opening=tuple(draw(MESSAGES)),
        first_prompt=draw(TEXT),
        settings=draw(st.sampled_from([SETTINGS, replace(SETTINGS, engine="", temperature=0.1 + 0.2)])),
        meta=draw(META),
        notes=draw(META),
        steps=tuple(found),
        end=draw(st.none() | st.builds(End, st.sampled_from(["terminated", "truncated", "failed"]), TEXT, TEXT)),
        unanswered=draw(st.none() | TEXT),
        step_rewards=tuple(draw(st.lists(st.none() | FLOATS, max_size=3))),
        reward=draw(st.none() | FLOATS),
    )


def exact(value: object) -> str:
    """A spelling in which values of different types or signs differ, as 1 and 1.0 do."""
    return repr(value)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@given(found=st.lists(rollouts(), max_size=3))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_what_is_loaded_is_what_was_saved(suffix: str, found: list[Rollout], tmp_path_factory) -> None:
    path = tmp_path_factory.getbasetemp() / f"set{suffix}"
    saved = RolloutSet(found)
    assert saved.save(path) == path
    loaded = RolloutSet.load(path)
    assert loaded == saved
    assert [exact(each) for each in loaded] == [exact(each) for each in saved]


def made(
    place: int, reward: float | None = None, length: int = 2, end: End | None = None, prompt: int | None = None
) -> Rollout:
    """A rollout with ids, whose prompts continue each other."""
    found: list[Step] = []
    for index in range(length):
        before = found[-1].prompt_ids + found[-1].ids if found else ()
        messages = (*(found[-1].messages if found else ()), {"role": "user", "content": f"Frage {index} — 你好 \u2028"})
        found.append(
            Step(
                index=index,
                prompt=messages[-1]["content"],
                messages=messages,
                text="<think>hm</think>so",
                content="so",
                thought="hm",
                thought_state="closed",
                prompt_ids=(*before, place, index),
                ids=(7, 8, 9),
                mask=(1, 1, 1),
                logprobs=(-0.1, -1e-300, -math.pi),
                tokens=3,
                finish_reason="stop",
                policy=PolicyVersion("run", place),
                seed=place,
                started=1.7e9 + 0.1,
                finished=1.7e9 + 0.3,
            )
        )
    end = End("terminated", "stop") if end is None else end
    prompt = place if prompt is None else prompt
    return Rollout(
        f"{place}-0", prompt, 0, place, (), "Frage 0", SETTINGS, {"a": None}, {}, tuple(found), end, None, (), reward
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_thousand_rollouts_come_back_equal(suffix: str, tmp_path: Path) -> None:
    many = RolloutSet(made(place, reward=place / 7, length=1 + place % 5) for place in range(1000))
    many.save(tmp_path / f"many{suffix}")
    assert RolloutSet.load(tmp_path / f"many{suffix}") == many
    assert [path.name for path in tmp_path.iterdir()] == [f"many{suffix}"], "nothing unfinished is left"


def test_sets_of_different_rollouts_differ() -> None:
    one = made(0)
    assert RolloutSet([one]) == RolloutSet([made(0)])
    changed = replace(one, steps=(one.steps[0], replace(one.steps[1], logprobs=(-0.1, -0.2, -0.3))))
    assert RolloutSet([one]) != RolloutSet([changed]) and RolloutSet([one]) != RolloutSet([one, one])
    assert RolloutSet([one]) != [one]


def test_the_columns_are_the_fields() -> None:
    schema = columns()
    assert schema.names == [each.name for each in fields(Rollout)]
    step = schema.field("steps").type.value_type
    names = {step.field(place).name for place in range(step.num_fields)}
    assert names == {each.name for each in fields(Step)} | {"messages_kept", "prompt_ids_kept"}
    kept = schema.field("settings").type
    assert [kept.field(place).name for place in range(kept.num_fields)] == [each.name for each in fields(Settings)]


def test_a_file_grows_with_the_length_of_rollouts_and_not_with_its_square(tmp_path: Path) -> None:
    sizes = [
        RolloutSet([made(0, length=length)]).save(tmp_path / f"{length}.jsonl").stat().st_size for length in (50, 100)
    ]
    assert sizes[1] < 2.2 * sizes[0]


# Files that cannot be read or written --------------------------------------------------------------------------------


@pytest.fixture(params=[".jsonl", ".parquet"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return RolloutSet(made(place) for place in range(3)).save(tmp_path / f"set{request.param}")


def change_header(path: Path, **changes: object) -> None:
    if path.suffix == ".jsonl":
        head, *lines = path.read_text(encoding="utf-8").split("\n")
        path.write_text("\n".join([json.dumps(json.loads(head) | changes), *lines]), encoding="utf-8")
    else:
        table = pq.read_table(path)
        header = json.loads(table.schema.metadata[b"rollouts"]) | changes
        pq.write_table(table.replace_schema_metadata({"rollouts": json.dumps(header)}), path)


def test_a_file_of_a_newer_version_is_refused_by_name(saved: Path) -> None:
    change_header(saved, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(DataError, match=f"{saved.name} was written with schema version 2 .* up to 1"):
        RolloutSet.load(saved)


def test_another_kind_of_file_is_refused(saved: Path) -> None:
    change_header(saved, format="recipes")
    with pytest.raises(DataError, match="is no file of rollouts"):
        RolloutSet.load(saved)


def test_a_file_that_was_cut_is_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[: saved.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=f"{saved.name} is damaged"):
        RolloutSet.load(saved)


def test_a_file_that_was_cut_between_lines_is_refused(tmp_path: Path) -> None:
    path = RolloutSet(made(place) for place in range(3)).save(tmp_path / "set.jsonl")
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:1]), encoding="utf-8")
    with pytest.raises(DataError, match="0 of 3 rollouts"):
        RolloutSet.load(path)
    path.write_text("")
    with pytest.raises(DataError, match="is empty"):
        RolloutSet.load(path)


def test_a_rollout_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    path = RolloutSet(made(place) for place in range(2)).save(tmp_path / "set.jsonl")
    head, first, second = path.read_text(encoding="utf-8").strip().split("\n")
    row = json.loads(second)
    del row["first_prompt"]
    path.write_text("\n".join([head, first, json.dumps(row)]), encoding="utf-8")
    with pytest.raises(DataError, match="(?s)rollout 1 cannot be read.*first_prompt"):
        RolloutSet.load(path)


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="is no file of rollouts"):
        RolloutSet.load(tmp_path / "a.parquet")


def test_unknown_suffixes_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'\.pkl'; rollouts are kept as \.jsonl or \.parquet"):
        RolloutSet().save(tmp_path / "a.pkl")
    with pytest.raises(DataError, match="no file"):
        RolloutSet.load(tmp_path / "a.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
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
    assert RolloutSet.load(path) == old and [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_log_prob_that_is_nan_is_refused(tmp_path: Path) -> None:
    one = made(0)
    bad = replace(one, steps=(one.steps[0], replace(one.steps[1], logprobs=(-1.0, float("nan"), -1.0))))
    with pytest.raises(DataError, match="log-prob of step 1 of rollout 0-0 is nan"):
        RolloutSet([bad]).save(tmp_path / "a.parquet")


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(StorageError, match="a.jsonl"):
        RolloutSet([made(0)]).save(tmp_path / "a.jsonl")


# A list --------------------------------------------------------------------------------------------------------------


def test_a_set_is_a_list_of_rollouts() -> None:
    found = RolloutSet([made(0), made(1), made(2)])
    assert len(found) == 3 and found[1].id == "1-0" and found[-1] in found
    assert found[1:] == RolloutSet([made(1), made(2)]) and found[:1] + found[1:] == found
    assert found.where(lambda rollout: rollout.seed > 1) == found[2:]
    assert repr(found) == "<RolloutSet of 3 rollouts with 6 steps>"
    with pytest.raises(DataError, match="entry 0"):
        RolloutSet(["text"])


def test_rewards_are_computed_again_without_an_engine() -> None:
    found = RolloutSet([made(0, reward=9.0), made(1, length=3)])
    assert [each.reward for each in found.rescore(lambda rollout: len(rollout.steps))] == [2.0, 3.0]
    by_step = found.rescore(lambda rollout: [0.5] * len(rollout.steps))
    assert [(each.step_rewards, each.reward) for each in by_step] == [((0.5,) * 2, 1.0), ((0.5,) * 3, 1.5)]
    assert [each.step_rewards for each in by_step.rescore(lambda rollout: None)] == [(), ()]
    assert found[0].reward == 9.0
    with pytest.raises(DataError, match="reward of rollout 0-0 cannot be computed: ZeroDivisionError"):
        found.rescore(lambda rollout: 1 / 0)

    async def judged(rollout: Rollout) -> float:
        return float(rollout.seed)

    with pytest.raises(ConfigError, match="rescore_async"):
        found.rescore(judged)
    assert [each.reward for each in asyncio.run(found.rescore_async(judged))] == [0.0, 1.0]


# Summary and plots ---------------------------------------------------------------------------------------------------


def test_a_summary_counts_what_is_there() -> None:
    cut = made(3, length=4, end=End("truncated", "max_steps"))
    cut = replace(cut, steps=(*cut.steps[:3], replace(cut.steps[3], finish_reason="length", tokens=8)))
    found = RolloutSet([made(0, 1.0, 1), made(1, 0.0, 1), made(2, 0.5, 2, End("terminated", "stop", "won")), cut])
    summary = found.summary()
    assert (summary.rollouts, summary.prompts, summary.not_scored) == (4, 4, 1)
    assert summary.reasons == {"terminated: stop": 2, "terminated: stop (won)": 1, "truncated: max_steps": 1}
    assert summary.steps["distribution"] == {1: 2, 2: 1, 4: 1}
    assert (summary.steps["mean"], summary.steps["min"], summary.steps["max"], summary.steps["total"]) == (2.0, 1, 4, 8)
    assert (summary.rewards["mean"], summary.rewards["n"]) == (0.5, 3)
    assert summary.rewards["ci95"] is None, "of three rollouts"
    assert summary.tokens["total"] == 7 * 3 + 8 and summary.tokens["per_step"]["mean"] == pytest.approx(29 / 8)
    assert (summary.cut["share"], summary.cut["n"]) == (1 / 8, 1)
    assert summary.thoughts == {"closed": 8} and summary.seconds["mean"] == pytest.approx(0.2)
    terminated = summary.ends["terminated"]
    assert (terminated["share"], terminated["n"]) == (0.75, 3)
    assert terminated["ci95"] is None
    many = RolloutSet([made(0, 1.0, 1), made(1, 0.0, 1), made(2, 0.5, 2), cut] * 3).summary().ends["terminated"]
    assert many["n"] == 9 and many["ci95"] is None, "twelve rollouts on four prompts"
    apart = RolloutSet([made(place, 1.0, 1, prompt=place) for place in range(12)]).summary().ends["terminated"]
    assert apart["ci95"] == pytest.approx([0.77, 1.0], abs=0.04), "twelve of twelve prompts"
    text = str(summary)
    for words in (
        "4 rollouts on 4 prompts",
        "75.0 %, 3",
        "1 max_steps",
        "rollouts by steps: 1: 2, 2: 1, 4: 1",
    ):
        assert words in text


def test_intervals_are_over_prompts_because_copies_resemble_each_other() -> None:
    """Six prompts, ten copies each, three always solved: sixty independent rollouts would give [0.37, 0.63]."""
    found = RolloutSet(made(place, float(place < 30), prompt=place // 10) for place in range(60))
    assert found.summary().rewards["ci95"] == pytest.approx([0.13, 0.87], abs=0.03)


def test_a_summary_of_nothing_has_no_means() -> None:
    summary = RolloutSet().summary()
    assert (summary.rollouts, summary.steps["mean"], summary.rewards["mean"]) == (0, None, None)
    assert "0 rollouts" in str(summary)


def test_plots_are_drawn(tmp_path: Path) -> None:
    found = RolloutSet(
        [made(0, 1.0), made(1, None, 3, End("truncated", "max_steps")), made(2, None, 0, End("failed", "error"))]
    )
    paths = found.rescore(lambda rollout: [0.5] * len(rollout.steps)).plot(tmp_path / "plots")
    assert [path.name for path in paths] == ["rewards.png", "steps.png", "ends.png", "by_step.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert [path.name for path in found.rescore(lambda rollout: None).plot(tmp_path / "bare")] == [
        "steps.png",
        "ends.png",
        "by_step.png",
    ]
    with pytest.raises(DataError, match="no rollouts"):
        RolloutSet().plot(tmp_path)


@pytest.mark.parametrize(
    ("rollouts", "prompts", "said"), [(1, 1, "1 rollout on 1 prompt;"), (2, 1, "2 rollouts on 1 prompt;")]
)
def test_one_is_not_in_the_plural(rollouts: int, prompts: int, said: str) -> None:
    from classroom_rl.rollout.set_summary import _counted

    assert f"{_counted(rollouts, 'rollout')} on {_counted(prompts, 'prompt')};" == said
