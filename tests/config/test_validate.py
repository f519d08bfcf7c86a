"""Malformed and malicious values: each ends with a message that names the key and the rule. Paths and texts."""

import pwd
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from classroom_rl.config.fields import IsPath, group_in, metadata_of, types_of
from classroom_rl.config.load import ROOT, to_yaml
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.validate import config_keys
from classroom_rl.errors import ClassroomError, ConfigError
from classroom_rl.rollout.datasets import load_problems
from tests.support.configs import BASE, SCHEMAS, loaded, loaded_text


@pytest.mark.parametrize(
    ("folder", "override", "message"),
    [
        ("train_rl", "train.learning_rat=1", r"key train\.learning_rat\. Did you mean train\.learning_rate\?"),
        ("train_rl", "learning_rate=1", r"no config key learning_rate\. Did you mean train\.learning_rate\?"),
        ("train_rl", "generation.max_turn=1", r"Did you mean generation\.max_turns\?"),
        ("train_rl", "train.xyzzy=1", r"no config key train\.xyzzy\. There are: algorithm, number_of_problems_"),
        ("train_sft", "model.max_len=1", r"Did you mean model\.max_length\?"),
        ("eval", "sampling=[greedy]", r"Did you mean samplings\?"),
        ("train_rl", "train.learning_rate=fast", r"train\.learning_rate is fast; it must be a number"),
        ("train_rl", "generation.max_turns=2.5", r"generation\.max_turns is 2\.5; it must be a whole number"),
        ("train_rl", "teacher_model.vllm.enforce_eager=maybe", r"eager is maybe; it must be true or false"),
        ("train_rl", "train=fast", r"Config key train is 'fast', but it is a group of keys"),
        ("train_rl", "train=[1]", r"Config key train is \[1\], but it is a group of keys"),
        ("train_rl", "=5", r"=5 is no override: there is no key before the =\. Write key=value"),
        ("train_rl", "logging.wandb_tags=[[1]]", r"logging\.wandb_tags\[0\] is \[1\]; it must be a text"),
        ("train_rl", "teacher_model.vllm=7", r"Config key teacher_model\.vllm is 7, but it is a group"),
        ("train_rl", "dataset.train_datasets=[{name_or_pat: x}]", r"mean dataset\.train_datasets\[\]\.name_or_path\?"),
        ("train_rl", "dataset.train_datasets=[{name: x}]", r"\[0\]\.name\. There are: name_or_path, split, ratio, "),
        ("train_rl", "logging.save_dir=${nowhere.else}", r"nowhere\.else"),
        ("train_rl", "generation.max_turns=0", r"generation\.max_turns is 0; it counts messages"),
        ("train_sft", "train.optimizer=adamw_tf", r"train\.optimizer is adamw_tf; it must be one of muon, adamw_torch"),
        ("train_sft", "train.lr_scheduler_type=cos", r"train\.lr_scheduler_type is cos; it must be one of"),
        ("train_sft", "train.dtype=float16", r"train\.dtype is float16; it must be one of float32, bfloat16"),
        ("train_sft", "train.per_device_train_batch_size=0", r"train\.per_device_train_batch_size is 0; .* at least 1"),
        ("train_sft", "dataset.train_datasets=[]", r"dataset\.train_datasets is empty"),
        ("eval", "samplings=[nucleus]", r"samplings is \['nucleus'\]"),
        ("train_rl", "train.learning_rate=[1,", r"\[1,"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(folder, override, message):
    with pytest.raises(ConfigError, match=message):
        loaded(folder, override)


ODD_NAMES = (
    "lr=1e-4", "a b", "a  b", "Übung", "日本語", "a:b", "12:30", "it's", 'a"b', "a{b}", "a(b)", "#1", "a;b", "a|b",
    "a&b", "a!b", "a~b", "a`b", "a^b", "a<b>", "a\\b", "a\\", "a\\'b", "a]b", "%s", "$x", "a=b=c", "=",
    "@home", "1e5", "null", "é",
    "x" * 200, "ß" * 100, "-", "--config-name", ".hidden", "a+b", "😀",
)  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_run_folder_of_any_name_arrives_as_it_was_given(tmp_path, name):
    assert loaded_text(tmp_path, BASE, f"logging.save_dir=runs/{name}").logging.save_dir == f"runs/{name}"
    written = yaml.dump({"logging": {"save_dir": f"runs/{name}"}})
    assert loaded_text(tmp_path, BASE + written).logging.save_dir.endswith(name)


@pytest.mark.parametrize("key", ["logging.save_dir", "teacher_model.model_name_or_path"])
@pytest.mark.parametrize("name", ["runs/a[1]", "runs/a*", "runs/what?"])
def test_a_folder_that_libraries_would_take_for_a_pattern_is_refused(tmp_path, key, name):
    with pytest.raises(ConfigError, match=rf"{key} is runs/\S+, with . in it: vLLM and DeepSpeed look for .* Rename"):
        loaded_text(tmp_path, BASE, f"{key}={name}")
    with pytest.raises(ConfigError, match=r"logging\.save_dir is 'runs/a\\tb', with a character that cannot be shown"):
        loaded_text(tmp_path, BASE, "logging.save_dir=runs/a\tb")


def test_the_name_of_a_model_behind_an_api_is_no_pattern(tmp_path):
    overrides = ["judge_model.base_url=http://127.0.0.1:1/v1", "judge_model.model_name_or_path=m[1]?"]
    assert loaded_text(tmp_path, BASE, *overrides).judge_model.model_name_or_path == "m[1]?"


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
    config = loaded_text(tmp_path, text, "logging.save_dir=~/runs/mine", "logging.wandb_run_name=~x")
    assert config.logging.save_dir == "/home/of/me/runs/mine" and config.logging.wandb_run_name == "~x"
    assert config.teacher_model.model_name_or_path == "/home/of/me/tutor"
    written = to_yaml(config)
    assert written.count("/home/of/me/") == 10 and "~/" not in written
    tutors = "tutors=[{name: a, model_name_or_path: '~/a'}, {name: b, adapter: '~/b'}]"
    more = ("--config-name=quickstart_compare", tutors, "pedagogical_reward_model=~/reward")
    measured = loaded("eval", *more)
    assert (measured.tutors[0].model_name_or_path, measured.tutors[1].adapter) == ("/home/of/me/a", "/home/of/me/b")
    assert measured.pedagogical_reward_model == "/home/of/me/reward"
    tuned = loaded("train_sft", "model.tokenizer_name_or_path=~/tokens")
    assert tuned.model.tokenizer_name_or_path == "/home/of/me/tokens"


def test_the_home_of_another_user_too(tmp_path):
    user = pwd.getpwuid(0)
    assert loaded_text(tmp_path, BASE, f"logging.save_dir=~{user.pw_name}/x").logging.save_dir == f"{user.pw_dir}/x"


@pytest.mark.parametrize("name", ["x[1].jsonl", "x*.jsonl", "x?.jsonl", "d[1]/a{b}.jsonl"])
def test_a_datasets_name_is_no_pattern(tmp_path, name):
    row = '{{"problem": "{}", "answer": "1"}}\n'
    for other in ("x1.jsonl", "xx.jsonl", "d1/ab.jsonl", name):
        path = tmp_path / other
        path.parent.mkdir(exist_ok=True)
        path.write_text(row.format(other), encoding="utf-8")
    text = f"{BASE}dataset: {{train_datasets: [{{name_or_path: '{tmp_path / name}'}}]}}\n"
    config = loaded_text(tmp_path, text)
    assert [problem.text for problem in load_problems(config.dataset.train_datasets)] == [name]


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
    tree: dict = {}
    for key, value in keys.items():
        *groups, last = key.split(".")
        holder = tree
        for name in groups:
            inner = holder.setdefault(name, {})
            holder = inner if isinstance(inner, dict) else holder
        holder[last] = value
    return tree


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
        config = loaded_text(folder, text, *overrides)
        dumped = to_yaml(config)
    except ClassroomError as error:
        assert str(error).strip()
        return
    assert loaded_text(folder, dumped) == config


@pytest.mark.parametrize("examples", [15, pytest.param(1000, marks=pytest.mark.full)])
def test_any_yaml_and_overrides_give_a_configuration_or_a_message(tmp_path, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(text=_texts, overrides=_overrides)
    def check(text: str, overrides: list[str]) -> None:
        settled(tmp_path, text, overrides)

    check()


def test_a_shipped_yaml_with_bytes_turned_over_gives_a_configuration_or_a_message(tmp_path):
    shipped = (ROOT / "config/train_rl/quickstart.yaml").read_text(encoding="utf-8")
    chance = random.Random(1)
    for _ in range(6):
        index = chance.randrange(len(shipped))
        changed = shipped[:index] + chance.choice(string.printable + "\u00e9\u2028") + shipped[index + 1 :]
        settled(tmp_path, changed, [])
