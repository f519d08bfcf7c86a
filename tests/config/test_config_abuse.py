"""Malformed and malicious configurations: each ends with a message that names the input and the rule."""

import pwd
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.compose import DEEPEST, LARGEST_FILE, MOST_VALUES, _override, quoted
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.fields import IsPath, group_in, metadata_of, types_of
from classroom_rl.config.load import ROOT, load, to_yaml
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig, check_train_sft
from classroom_rl.config.validate import config_keys
from classroom_rl.errors import ClassroomError, ConfigError
from classroom_rl.rollout.datasets import load_problems
from tests.config.test_load import run

SCHEMAS = {
    "train_rl": (TrainRLConfig, check_train_rl),
    "train_sft": (TrainSFTConfig, check_train_sft),
    "eval": (EvalConfig, check_eval),
}


def loaded(folder: Path, text: str, *overrides: str, schema: str = "train_rl") -> Any:
    (folder / "own.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    arguments = ["--config-dir", str(folder), "--config-name", "own", *overrides]
    return load(SCHEMAS[schema][0], schema, arguments, SCHEMAS[schema][1])


BASE = "defaults: [quickstart, _self_]\n"
BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]\n", r"own\.yaml, line 1: \*a stands inside of what it stands for, which has no end"),
        ("seed: 1\ngeneration: &a {student_names: [*a]}\n", r"line 2: \*a stands inside of what it stands for"),
        (BOMB, rf"own\.yaml, line \d+: with its aliases unfolded .* more than {MOST_VALUES} values"),
        (f"seed: {'[' * 3000}{']' * 3000}\n", rf"own\.yaml, line 1: .* nested more than {DEEPEST} deep"),
        (f"seed: {'{a: ' * 3000}\n", rf"own\.yaml, line 1: .* nested more than {DEEPEST} deep"),
        (CHAIN, rf"own\.yaml, line \d+: .* nested more than {DEEPEST} deep"),
        ("#" * (LARGEST_FILE + 1), rf"own\.yaml has {LARGEST_FILE + 1} bytes; a configuration has at most"),
        ("5", r"own\.yaml cannot be read"),
        ("null: 1\n", r"own\.yaml cannot be read"),
        ("seed: !!int x\n", r"own\.yaml cannot be read: a value does not fit its tag"),
        ("seed: !!timestamp x\n", r"own\.yaml cannot be read: a value does not fit its tag"),
        ("defaults: 5\n", "defaults must be a list"),
        ("logging: {save_dir: '${a'}\n", r"own\.yaml cannot be read"),
        (f"seed: {'9' * 5000}\n", r"own\.yaml cannot be read"),
        ('logging: {wandb_run_name: "\\ud800"}\n', r"logging\.wandb_run_name holds '\\ud800', which is no Unicode"),
        (f"{BASE}generation: {{student_error_rate: 0x{'f' * 6000}}}\n", r"student_error_rate is 2\*\*23999 and more"),
    ],
)  # fmt: skip
def test_a_yaml_that_no_run_needs_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


def test_aliases_as_people_write_them_are_taken(tmp_path):
    text = f"{BASE}teacher_model: {{vllm: &e {{max_length: 512}}}}\nstudent_model: {{vllm: {{<<: *e, top_k: 5}}}}\n"
    config = loaded(tmp_path, text)
    assert (config.teacher_model.vllm.max_length, config.student_model.vllm.max_length) == (512, 512)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"seed={'[' * 3000}{']' * 3000}", rf"The override seed=\[.*… is nested more than {DEEPEST} deep"),
        ("+=5", r"\+=5 is no override: there is no key before the ="),
        ("foo", "The override foo cannot be read"),
        ("", "The override  cannot be read"),
        ("train.mu=1,2", "Ambiguous value for argument"),
        ("hydra=5", "cannot be read: Config group override must be"),
        (f"seed={'9' * 5000}", "4300 digits"),
        ("train.learning_rate.x=5", r"train\.learning_rate"),
        (f"logging.save_dir={'x' * 300}", "with a name of 300 bytes .* name has at most 255"),
        (f"logging.save_dir={'x/' * 3000}", "a path at most 4096"),
        ("generation.student_personas_prompts_paths.a=~nobody-here/x.txt", "this machine has no user nobody-here"),
        ('logging.save_dir="a\0b"', "no path holds a NUL character"),
    ],
)  # fmt: skip
def test_an_override_that_no_run_needs_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, BASE, override)


ODD_NAMES = (
    "lr=1e-4", "a b", "a  b", "Übung", "日本語", "a:b", "12:30", "it's", 'a"b', "a{b}", "a(b)", "#1", "a;b", "a|b",
    "a&b", "a!b", "a~b", "a`b", "a^b", "a<b>", "a\\b", "a\\", "a\\'b", "a]b", "%s", "$x", "a=b=c", "=",
    "@home", "1e5", "null", "é",
    "x" * 200, "ß" * 100, "-", "--config-name", ".hidden", "a+b", "😀",
)  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_run_folder_of_any_name_arrives_as_it_was_given(tmp_path, name):
    assert loaded(tmp_path, BASE, f"logging.save_dir=runs/{name}").logging.save_dir == f"runs/{name}"
    assert loaded(tmp_path, BASE + yaml.dump({"logging": {"save_dir": f"runs/{name}"}})).logging.save_dir.endswith(name)


@given(st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="*?[,$"), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_quoted_text_is_read_as_itself(text):
    override = OverridesParser.create().parse_override(f"++a={quoted(text)}")
    assert override.value() == text
    assert OverridesParser.create().parse_override(_override(f"a=x/{text}", sweeps=False)).value() == f"x/{text}"


@pytest.mark.parametrize("key", ["logging.save_dir", "teacher_model.model_name_or_path"])
@pytest.mark.parametrize("name", ["runs/a[1]", "runs/a*", "runs/what?"])
def test_a_folder_that_libraries_would_take_for_a_pattern_is_refused(tmp_path, key, name):
    with pytest.raises(ConfigError, match=rf"{key} is runs/\S+, with . in it: vLLM and DeepSpeed look for .* Rename"):
        loaded(tmp_path, BASE, f"{key}={name}")
    with pytest.raises(ConfigError, match=r"logging\.save_dir is 'runs/a\\tb', with a character that cannot be shown"):
        loaded(tmp_path, BASE, "logging.save_dir=runs/a\tb")


def test_the_name_of_a_model_behind_an_api_is_no_pattern(tmp_path):
    overrides = ["judge_model.base_url=http://127.0.0.1:1/v1", "judge_model.model_name_or_path=m[1]?"]
    assert loaded(tmp_path, BASE, *overrides).judge_model.model_name_or_path == "m[1]?"


def test_such_a_yaml_ends_a_program_with_a_message(tmp_path):
    (tmp_path / "loop.yaml").write_text("a: &a [*a]\n", encoding="utf-8")
    result = run("vllm_server.py", "--config-dir", str(tmp_path), "--config-name", "loop", "dry_run=true")
    assert result.returncode == 2 and "error: " in result.stderr and "Traceback" not in result.stderr


# Paths --------------------------------------------------------------------------------------------------------------


def test_every_key_that_holds_a_path_is_known_as_one():
    """By its name."""
    named = [
        (key, kind)
        for schema, _ in SCHEMAS.values()
        for key, kind in keys_and_types(schema)
        if key.endswith(("_path", "_paths", "_dir", "template", "adapter"))
    ]
    assert len(named) > 20
    assert not [key for key, kind in named if not any(isinstance(mark, IsPath) for mark in metadata_of(kind))]


def keys_and_types(schema: type) -> Iterator[tuple[str, Any]]:
    for name, kind in types_of(schema).items():
        group = group_in(kind)
        yield from [(name, kind)] if group is None else keys_and_types(group)


def test_a_home_folder_is_written_out_wherever_a_path_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/me")
    text = f"""{BASE}
teacher_model: {{model_name_or_path: ~/tutor}}
student_model: {{model_name_or_path: ~/student}}
generation:
  teacher_prompt_path: ~/teacher.txt
  student_personas_prompts_paths: {{correct_student: ~/a.txt, error_student: ~/b.txt}}
  student_final_prompt_path: ~/final.txt
  judges_rules_prompts_paths: {{pedagogical_eval: ~/judge.txt}}
dataset: {{train_datasets: [{{name_or_path: ~/lessons.jsonl, problem_template: ~/plan.txt}}]}}
"""
    config = loaded(tmp_path, text, "logging.save_dir=~/runs/mine", "logging.wandb_run_name=~x")
    assert config.logging.save_dir == "/home/of/me/runs/mine" and config.logging.wandb_run_name == "~x"
    assert config.teacher_model.model_name_or_path == "/home/of/me/tutor"
    written = to_yaml(config)
    assert written.count("/home/of/me/") == 10 and "~/" not in written
    tutors = "tutors=[{name: a, model_name_or_path: '~/a'}, {name: b, adapter: '~/b'}]"
    more = ("--config-name=quickstart_compare", tutors, "pedagogical_reward_model=~/reward")
    measured = load(EvalConfig, "eval", more, check_eval)
    assert (measured.tutors[0].model_name_or_path, measured.tutors[1].adapter) == ("/home/of/me/a", "/home/of/me/b")
    assert measured.pedagogical_reward_model == "/home/of/me/reward"
    tuned = load(TrainSFTConfig, "train_sft", ["model.tokenizer_name_or_path=~/tokens"], check_train_sft)
    assert tuned.model.tokenizer_name_or_path == "/home/of/me/tokens"


def test_the_home_of_another_user_too(tmp_path):
    user = pwd.getpwuid(0)
    assert loaded(tmp_path, BASE, f"logging.save_dir=~{user.pw_name}/x").logging.save_dir == f"{user.pw_dir}/x"


def test_a_folder_of_configurations_may_be_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text(f"{BASE}seed: 8\n", encoding="utf-8")
    assert load(TrainRLConfig, "train_rl", ["--config-dir=~", "--config-name=own"], check_train_rl).seed == 8


@pytest.mark.parametrize("name", ["x[1].jsonl", "x*.jsonl", "x?.jsonl", "d[1]/a{b}.jsonl"])
def test_a_datasets_name_is_no_pattern(tmp_path, name):
    row = '{{"problem": "{}", "answer": "1"}}\n'
    for other in ("x1.jsonl", "xx.jsonl", "d1/ab.jsonl", name):
        path = tmp_path / other
        path.parent.mkdir(exist_ok=True)
        path.write_text(row.format(other), encoding="utf-8")
    text = f"{BASE}dataset: {{train_datasets: [{{name_or_path: '{tmp_path / name}'}}]}}\n"
    config = loaded(tmp_path, text)
    assert [problem.text for problem in load_problems(config.dataset.train_datasets)] == [name]


# Anything at all ----------------------------------------------------------------------------------------------------

_ODD = ["~", "~/x", "${seed}", "${", "${oc.env:X}", "???", "null", ".nan", "-.inf", "1e400", "0x_", "=5", "[", "]]",
        "{a: 1}", "[1, [2]]", "!!int x", "!!binary z", "*a", "&a", "&a [*a]", "<<", "\ud800", "\0", "[" * 200,
        "9" * 5000, "-1", "0", "10**20", "1" + "0" * 20, "true", "a,b", "'", '"', "999.1.1.1", "x" * 300, "defaults",
        "hydra"]  # fmt: skip
_KEYS = [*config_keys(TrainRLConfig), "defaults", "hydra", "hydra.searchpath", "", "train.x", "seed.x"]
_words = st.one_of(st.sampled_from(_ODD), st.text(string.printable, max_size=12), st.text(max_size=8))
_scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _words)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.one_of(_words, st.integers()), inner, max_size=3),
    max_leaves=6,
)


def nested(keys: dict[str, Any]) -> dict:
    """Keys with dots as groups, as far as they do not contradict each other."""
    found: dict = {}
    for key, value in keys.items():
        *groups, last = key.split(".")
        holder = found
        for name in groups:
            inner = holder.setdefault(name, {})
            holder = inner if isinstance(inner, dict) else holder
        holder[last] = value
    return found


def written(keys: dict[str, Any]) -> str:
    return yaml.safe_dump({"defaults": ["quickstart", "_self_"]} | nested(keys), allow_unicode=True)


_texts = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from([*_ODD, "seed: ", "train: ", "\n", "  ", "- ", "a: "]), max_size=8).map("".join),
    st.dictionaries(st.sampled_from(_KEYS), _values, min_size=1, max_size=4).map(written),
)
_overrides = st.lists(
    st.tuples(st.one_of(st.sampled_from(_KEYS), _words), st.sampled_from(["=", "", "+", "=="]), _words).map("".join),
    max_size=2,
)


def settled(folder: Path, text: str, overrides: list[str]) -> None:
    """The configuration resolves and can be written down and read again, or a message says why not."""
    try:
        config = loaded(folder, text, *overrides)
        again = to_yaml(config)
    except ClassroomError as error:
        assert str(error).strip()
        return
    assert loaded(folder, again) == config


_QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=15, deadline=None, suppress_health_check=_QUIET)
@given(text=_texts, overrides=_overrides)
def test_any_yaml_and_overrides_give_a_configuration_or_a_message(tmp_path, text, overrides):
    settled(tmp_path, text, overrides)


@pytest.mark.full
@settings(max_examples=1000, deadline=None, suppress_health_check=_QUIET)
@given(text=_texts, overrides=_overrides)
def test_many_yamls_and_overrides_give_a_configuration_or_a_message(tmp_path, text, overrides):
    settled(tmp_path, text, overrides)


def test_a_shipped_yaml_with_bytes_turned_over_gives_a_configuration_or_a_message(tmp_path):
    shipped = (ROOT / "config/train_rl/quickstart.yaml").read_text(encoding="utf-8")
    chance = random.Random(1)
    for _ in range(6):
        place = chance.randrange(len(shipped))
        changed = shipped[:place] + chance.choice(string.printable + "\u00e9\u2028") + shipped[place + 1 :]
        settled(tmp_path, changed, [])
