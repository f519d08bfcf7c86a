"""Every number has a range and every name its choices; a value outside is refused with the rule."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from classroom_rl.config.base import DatasetSource, LoggingConfig
from classroom_rl.config.fields import Range, metadata_of, types_of, values_of
from classroom_rl.config.load import to_yaml, validate
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.errors import ConfigError
from tests.support.configs import SCHEMAS, loaded

NOT_TAKEN = [
    ("generation.max_turns", ["100000000000000000000", f"0x{'f' * 6000}"], "must be at most 10000"),
    ("generation.student_error_rate", ["-0.1", "1.1", ".nan", "often", "true"], "a share from 0 to 1"),
    ("generation.student_error_rate", ["{correct_student: -1, error_student: 2}"], "a weight from 0, not all 0"),
    ("generation.student_error_rate", ["{correct_student: 0, error_student: 0}"], "a weight from 0, not all 0"),
    ("generation.student_error_rate", ["{correct_student: .inf, error_student: 1}"], "a weight from 0, not all 0"),
    ("generation.student_error_rate", ["{correct_student: 1}"], "gives each persona"),
    ("generation.server_host", ["''"], "name an address of this machine"),
    ("generation.allowed_hosts", ["['http://a']", "['a:80']", "['']", "['*']"], "each is a host's name alone"),
    ("generation.server_host", ["999.1.1.1", "1.2.3", "'::g'"], "is no IP address"),
    ("generation.server_host", ["'my host'", "'http://x'"], "(an IP address or the name of a machine|is no IP)"),
    ("generation.server_urls", ["['http://x:99999']", "['http://']", "['http://1.2.3:1']"], "(is no|such as)"),
    ("generation.student_names", ["[7]", "[[Alex]]"], "each is a text, or null"),
    ("generation.server_index", ["-1", "1"], "must be (at least 0|from 0 to 0)"),
    ("generation.schedule", ["lockstep"], "must be one of concurrent, phased"),
    ("generation.supervisor.on_invalid", ["ignore", "Retry"], "must be one of observe, retry, replace"),
    ("generation.supervisor.max_retries", ["101"], "must be at most 100"),
    ("generation.teacher_tools", ["[os.system]", "[calculator, calculators]"], "no such tool; there are: calculator"),
    ("generation.teacher_tools", ["[calculator, calculator]"], "name each tool once"),
    ("generation.post_test.scored_by", ["model", "Ledger"], "must be one of ledger, student"),
    ("supervisor_model", ["{model_name_or_path: rules, replies_per_review: 0}"], "must be at least 1"),
    ("generation.forced_conversation_type", ["both"], "is one of guided, attempt or null"),
    ("teacher_model.vllm.temperature", ["0", "-1", ".nan", ".inf"], "."),
    ("teacher_model.vllm.dtype", ["fp16", "float64"], "must be one of auto, bfloat16"),
    ("student_model.vllm.cpu_cores", ["all", "0;rm", "'1,'"], "it is a list of cores"),
    ("teacher_model.lora.rank", ["0", "513"], "must be (at least 1|from 1 to 512)"),
    ("judge_model.response_format", ["xml", "json"], "must be one of auto, json_schema, text"),
    ("judge_model.mode", ["relative"], "must be one of absolute, group"),
    ("judge_model.mode", ["group"], "is group, but rubric is no model"),
    ("guards.held_out_judge_model", ["{base_url: 'http://x', mode: group}"], "what is measured is judged one by one"),
    ("judge_model.max_cost_usd", ["5"], "needs judge_model.usd_per_million_prompt_tokens"),
    ("judge_model.base_url", ["openrouter.ai", "'file:///etc'"], "must begin with http"),
    ("guards.held_out_judge_model", ["{model_name_or_path: Qwen/Qwen3-4B}"], "must be behind an API"),
    ("guards.held_out_judge_model", ["{base_url: x}"], "must begin with http"),
    ("reward_model.model_name_or_path", ["''"], "it is Answer, None, or the name or folder"),
    ("train.num_samples_per_problem", ["1", "0"], "needs at least 2"),
    ("train.learning_rate", ["2000"], "must be at most 1000"),
    ("train.lr_scheduler_type", ["cos"], "must be one of linear, cosine"),
    ("train.optimizer", ["adam", "muon"], "must be one of adamw_torch"),
    ("train.loss_type", ["ppo", "GRPO", "my.loss", ":loss", "a..b:f", "my loss:f", "a:f()"], "must be one of grpo"),
    ("train.scale_rewards", ["yes", "std"], "must be one of group"),
    ("train.dtype", ["fp16", "float64"], "must be one of float32"),
    ("train.reward_weights", ["{pedagogical: .nan}"], "must be a finite number"),
    ("train.importance_sampling_mode", ["token"], "must be one of token_truncate"),
    ("train.groups_without_variance", ["skip"], "must be one of keep, drop, resample"),
    ("train.publish_through", ["ram"], "must be one of disk, memory, nccl"),
    ("train.turn_credit.mode", ["sum"], "must be one of none, immediate, to_go, progress"),
    ("train.corrections.mode", ["sft"], "must be one of none, same_step, pass"),
    ("train.algorithm", ["reinforce", "PPO"], "must be one of grpo, ppo"),
    ("train.ppo.head", ["MLP", "null"], "must be one of linear, mlp"),
    ("train.ppo.gae_over", ["message"], "must be one of tokens, turns"),
    ("logging.report_to", ["[wandbb]"], "must be one of azure_ml"),
    ("logging.save_dir", ["''"], "name the folder"),
    ("logging.save_steps", ["0"], "must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "wrong", "rule"), NOT_TAKEN)
def test_a_value_that_is_not_taken_is_refused_with_the_rule(key, wrong, rule):
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"{key}[ .\[].*{rule}"):
            with_value(key, value)


def _leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in types_of(schema).items():
        if is_dataclass(kind):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


def _is_number(kind: Any) -> bool:
    members = get_args(kind) if get_origin(kind) is UnionType or get_origin(kind) is Union else (kind,)
    return any(member in (int, float) or getattr(member, "__origin__", None) in (int, float) for member in members)


def _range_of(kind: Any) -> Range | None:
    return next((mark for mark in metadata_of(kind) if isinstance(mark, Range)), None)


RANGES = {key: _range_of(kind) for key, kind in _leaves(TrainRLConfig) if _is_number(kind)}
"""Which range it is stands in docs/keys.md, which is made from the schema."""


@pytest.mark.parametrize("key", RANGES)
def test_a_number_below_or_above_its_range_is_refused_with_the_rule(key: str):
    allowed = RANGES[key]
    below = allowed.least if allowed.open_below else allowed.least - 1 - (allowed.least - 1 == allowed.also)
    above = allowed.most if allowed.open_above else allowed.most * 2
    for wrong in (below, above, ".nan", ".inf"):
        with pytest.raises(ConfigError, match=rf"{key} is .*(it must be a|{re.escape(allowed.rule)})"):
            with_value(key, str(wrong))


@cache
def _quickstart() -> str:
    return to_yaml(loaded("train_rl"))


def with_value(key: str, value: str) -> TrainRLConfig:
    """The quickstart's configuration with one value, given as YAML, changed in its file."""
    raw = OmegaConf.create(_quickstart())
    OmegaConf.update(raw, key, yaml.safe_load(value))
    return validate(raw, *SCHEMAS["train_rl"])


def test_the_configuration_that_wrong_values_are_put_into_is_right():
    assert with_value("seed", "3").seed == 3


@pytest.mark.parametrize("name", ["sapo", "classroom_rl.trainer.losses:clipped"])
def test_a_loss_is_a_known_name_or_a_function_of_one_s_own(name: str):
    assert loaded("train_rl", f"train.loss_type={name}").train.loss_type == name


@pytest.mark.parametrize(
    ("folder", "overrides", "message"),
    [
        (
            "train_rl",
            [
                "dataset.train_datasets=[]",
                "generation.number_judge_attempts=0",
                "~generation.judges_rules_prompts_paths",
                "train.reward_weights={length: 1.0}",
            ],
            "dataset.train_datasets is empty",
        ),
        ("train_rl", ["train.epochs=0", "train.max_steps=0"], "nothing would be trained"),
        (
            "train_rl",
            ["guards.judge_check_every_n_steps=5", "guards.canaries=false"],
            "there is nothing to check with: set guards.held_out_judge_model",
        ),
        (
            "train_rl",
            [
                "guards.judge_check_every_n_steps=5",
                "generation.number_judge_attempts=0",
                "train.reward_weights={length: 1.0}",
            ],
            "there is no judge to check",
        ),
        (
            "train_rl",
            ["guards.held_out_judge_model.model_nam=x"],
            r"mean guards\.held_out_judge_model\.model_name_or_path\?",
        ),
        ("train_sft", ["train.learning_rate=nan"], "train.learning_rate is nan"),
        ("train_sft", ["dataset.max_val_examples=0"], "at least 1, or -1 for all"),
        ("train_sft", ["logging.save_steps=-1"], "logging.save_steps is -1; it must be at least 0"),
        ("train_sft", ["seed=-1"], "seed is -1"),
        ("eval", ["dataset.max_val_examples=0"], "at least 1, or -1 for all"),
        ("eval", ["counterfactuals.forks=-1"], "counterfactuals.forks is -1; it must be at least 0"),
        ("eval", ["counterfactuals.playouts=7"], "counterfactuals.playouts is 7; it must be from 8 to 4096"),
        ("eval", ["counterfactuals.siblings=0"], "counterfactuals.siblings is 0; it must be from 1 to 4096"),
        ("eval", ["+benchmark={path: a.jsonl, max_dialogues: 0}"], "max_dialogues is 0; .*at least 1, or -1 for all"),
        ("eval", ["+benchmark={path: a.jsonl, max_dialogues: 2000000000}"], "max_dialogues .*at most 1000000000"),
        ("eval", ["generation.sample_timeout_s=0"], "must be above 0"),
        ("eval", ["server_url=localhost:8005"], "server_url is 'localhost:8005'; it must begin with http"),
        ("eval", ["server_url=null", "student_model.vllm.max_length=0"], "must be at least 2"),
        ("eval", ["num_samples_per_problem=5000"], "a server holds 4096 conversations at once"),
    ],
)
def test_values_out_of_range_are_refused_by_the_other_programs_too(folder, overrides, message):
    with pytest.raises(ConfigError, match=message):
        loaded(folder, *overrides)


def test_there_is_no_number_that_may_be_anything():
    """A key that is new has to be given a range, and a line above."""
    assert not [
        key
        for schema, _ in SCHEMAS.values()
        for group, name, key in values_of(schema())
        if _is_number(kind := types_of(type(group))[name])
        and not any(isinstance(mark, Range) for mark in metadata_of(kind))
    ], "give it one of the types of src/classroom_rl/config/fields.py that have a range"


PROBES = [
    *(None, True, False, 0, 1, 7, -1, -2, 70000, 10**12, 0.0, 0.5, 1.0, 1.5, -0.5, 1e-7, float("nan"), float("inf")),
    *("", "a", "5", " 5 ", "-1", "5.0", "0.5", "1e-4", "1_000", "true", "yes", "off", "none", "nan", "inf"),
    *([], ["a"], [1], [True], [None], [["a"]], [{}], {}, {"a": 1}, {"a": "0.5"}, {"a": None}, {"a": [1]}),
]
TAKEN = {
    (TrainConfig, "mu"): "1, 7, 70000, '5', ' 5 ', '1_000'",
    (TrainConfig, "max_steps"): "0, 1, 7, -1, 70000, '5', ' 5 ', '-1', '1_000'",
    (TrainConfig, "learning_rate"): "0, 1, 7, 0.0, 0.5, 1.0, 1.5, 1e-07, '5', ' 5 ', '5.0', '0.5', '1e-4', '1_000'",
    (TrainConfig, "epsilon_high"): "None, 1, 7, 70000, 0.5, 1.0, 1.5, 1e-07, '5', ' 5 ', '5.0', '0.5', '1e-4', '1_000'",
    (TrainConfig, "gradient_checkpointing"): "True, False, 0, 1, 7, -1, -2, 70000, 1000000000000, '5', ' 5 ', '-1', "
    "'1_000', 'true', 'yes', 'off'",
    (TrainConfig, "reward_weights"): "None, {}, {'a': 1}, {'a': '0.5'}",
    (DatasetSource, "ratio"): "1, 0.5, 1.0, 1e-07, '0.5', '1e-4'",
    (LoggingConfig, "wandb_tags"): "[], ['a'], [1], [True]",
}
"""Of the values above, those that a key takes."""


@pytest.mark.parametrize(("group", "name"), TAKEN)
def test_a_type_takes_these_values_and_refuses_the_others(group: type, name: str):
    """Recorded when Hydra's structured configurations read them: users' files and environment variables go on."""
    kind, accepted = TypeAdapter(types_of(group)[name]), []
    for probe in PROBES:
        with suppress(ValidationError):
            kind.validate_python(probe)
            accepted.append(repr(probe))
    assert ", ".join(accepted) == TAKEN[group, name]


@pytest.mark.parametrize(
    ("group", "name", "value", "becomes"),
    [
        (TrainConfig, "mu", "1_000", 1000),
        (TrainConfig, "learning_rate", "1e-4", 1e-4),
        (TrainConfig, "gradient_checkpointing", "off", False),
        (TrainConfig, "gradient_checkpointing", 7, True),
        (TrainConfig, "reward_weights", {"a": "0.5"}, {"a": 0.5}),
        (LoggingConfig, "wandb_tags", [True, 1], ["True", "1"]),
    ],
)
def test_what_a_value_becomes(group: type, name: str, value: object, becomes: object):
    assert TypeAdapter(types_of(group)[name]).validate_python(value) == becomes


def test_a_text_is_any_scalar():
    scalars = [kind for kind in PROBES if not isinstance(kind, list | dict) and kind is not None]
    text = TypeAdapter(types_of(LoggingConfig)["wandb_project"])
    assert [text.validate_python(value) for value in scalars] == [str(value) for value in scalars]
