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

OUT_OF_RANGE = [
    ("generation.max_turns", ["0", "-3"], "must be at least 1"),
    ("generation.max_turns", ["100000000000000000000", f"0x{'f' * 6000}"], "must be at most 10000"),
    ("generation.student_error_rate", ["-0.1", "1.1", ".nan", "often", "true"], "a share from 0 to 1"),
    ("generation.student_error_rate", ["{correct_student: -1, error_student: 2}"], "a weight from 0, not all 0"),
    ("generation.student_error_rate", ["{correct_student: .inf, error_student: 1}"], "a weight from 0, not all 0"),
    ("generation.student_error_rate", ["{correct_student: 1}"], "gives each persona"),
    ("generation.max_tokens_in_conversation", ["0", "-1"], "must be at least 1"),
    ("generation.max_tokens_per_turn", ["0"], "must be at least 1"),
    ("generation.max_tokens_per_student_attempt", ["0"], "must be at least 1"),
    ("generation.max_tokens_per_judge_attempt", ["0"], "must be at least 1"),
    ("generation.number_student_attempts", ["-1"], "must be at least 0"),
    ("generation.number_judge_attempts", ["-1"], "must be at least 0"),
    ("generation.extra_penalty_for_rejected_judges", ["-0.5", ".inf", ".nan"], "must be at least 0"),
    ("generation.low_score_threshold", ["-0.1", "1.5", ".nan"], "must be from 0 to 1"),
    ("generation.server_start_timeout_s", ["0", "-1", ".inf"], "must be above 0"),
    ("generation.sample_timeout_s", ["0", "-1", ".nan"], "must be above 0"),
    ("generation.turn_timeout_s", ["0"], "must be above 0"),
    ("generation.answer_timeout_s", ["0", "-1", ".inf", ".nan"], "must be above 0"),
    ("generation.load_weights_timeout_s", ["0"], "must be above 0"),
    ("generation.server_port", ["0", "-1", "65536"], "must be from 1 to 65535"),
    ("generation.server_host", ["''"], "name an address of this machine"),
    ("generation.allowed_hosts", ["['http://a']", "['a:80']", "['']", "['*']"], "each is a host's name alone"),
    ("generation.server_host", ["999.1.1.1", "1.2.3", "'::g'"], "is no IP address"),
    ("generation.server_host", ["'my host'", "'http://x'"], "(an IP address or the name of a machine|is no IP)"),
    ("generation.server_urls", ["['http://x:99999']", "['http://']", "['http://1.2.3:1']"], "(is no|such as)"),
    ("generation.student_names", ["[7]", "[[Alex]]"], "each is a text, or null"),
    ("generation.server_index", ["-1", "1"], "must be (at least 0|from 0 to 0)"),
    ("generation.schedule", ["lockstep"], "must be one of concurrent, phased"),
    ("generation.supervisor.on_invalid", ["ignore", "Retry"], "must be one of observe, retry, replace"),
    ("generation.supervisor.max_retries", ["0", "101"], "must be (at least 1|at most 100)"),
    ("generation.supervisor.share", ["-0.1", "1.1", ".nan"], "must be from 0 to 1"),
    ("generation.supervisor.anneal_steps", ["-1"], "must be at least 0"),
    ("generation.supervisor.max_tokens", ["0"], "must be at least 1"),
    ("generation.tool_limits.calls", ["0", "101"], "must be from 1 to 100"),
    ("generation.tool_limits.seconds", ["0", "-1", ".inf", ".nan"], "must be above 0"),
    ("generation.tool_limits.characters", ["0", "1000001"], "must be from 1 to 1000000"),
    ("generation.teacher_tools", ["[os.system]", "[calculator, calculators]"], "no such tool; there are: calculator"),
    ("generation.teacher_tools", ["[calculator, calculator]"], "name each tool once"),
    ("generation.post_test.scored_by", ["model", "Ledger"], "must be one of ledger, student"),
    ("generation.post_test.siblings", ["0", "101"], "must be from 1 to 100"),
    ("generation.post_test.max_tokens_per_answer", ["0"], "must be at least 1"),
    ("supervisor_model", ["{model_name_or_path: rules, replies_per_review: 0}"], "must be at least 1"),
    ("generation.forced_conversation_type", ["both"], "is one of guided, attempt or null"),
    ("teacher_model.vllm.temperature", ["0", "-1", ".nan", ".inf"], "."),
    ("student_model.vllm.temperature", ["-0.5"], "must be at least 0"),
    ("teacher_model.vllm.top_p", ["0", "1.2", ".nan"], "above 0 and at most 1"),
    ("student_model.vllm.top_k", ["0", "-2"], "at least 1, or -1 for no limit"),
    ("teacher_model.vllm.max_length", ["1", "0"], "must be at least 2"),
    ("judge_model.vllm.max_num_seqs", ["0"], "must be at least 1"),
    ("teacher_model.vllm.gpu_memory_utilization", ["0", "1.1", "90"], "above 0 and at most 1"),
    ("teacher_model.vllm.number_of_gpus_per_instance", ["0"], "must be at least 1"),
    ("teacher_model.vllm.dtype", ["fp16", "float64"], "must be one of auto, bfloat16"),
    ("student_model.vllm.cpu_kvcache_gib", ["0", "-4"], "must be at least 1"),
    ("student_model.vllm.cpu_cores", ["all", "0;rm", "'1,'"], "it is a list of cores"),
    ("teacher_model.lora.rank", ["0", "513"], "must be (at least 1|from 1 to 512)"),
    ("teacher_model.lora.alpha", ["0", "-32"], "must be at least 1"),
    ("teacher_model.lora.dropout", ["-0.1", "1", ".nan"], "at least 0 and below 1"),
    ("judge_model.max_concurrent_requests", ["0"], "must be at least 1"),
    ("judge_model.request_timeout_s", ["0", "-1"], "must be above 0"),
    ("judge_model.max_failed_share", ["-0.1", "1.1", "20"], "must be from 0 to 1"),
    ("judge_model.response_format", ["xml", "json"], "must be one of auto, json_schema, text"),
    ("judge_model.replies_per_attempt", ["0"], "must be at least 1"),
    ("judge_model.anchor_share", ["-0.1", "1.1", ".nan"], "must be from 0 to 1"),
    ("judge_model.mode", ["relative"], "must be one of absolute, group"),
    ("judge_model.mode", ["group"], "is group, but rubric is no model"),
    ("guards.held_out_judge_model", ["{base_url: 'http://x', mode: group}"], "what is measured is judged one by one"),
    ("judge_model.requests_per_minute", ["0", "-1"], "must be at least 1"),
    ("judge_model.tokens_per_minute", ["0"], "must be at least 1"),
    ("judge_model.deadline_s", ["0", ".nan"], "must be above 0"),
    ("judge_model.usd_per_million_prompt_tokens", ["-1", ".nan"], "must be at least 0"),
    ("judge_model.usd_per_million_completion_tokens", ["-1"], "must be at least 0"),
    ("judge_model.max_cost_usd", ["5"], "needs judge_model.usd_per_million_prompt_tokens"),
    ("judge_model.base_url", ["openrouter.ai", "'file:///etc'"], "must begin with http"),
    ("guards.judge_check_every_n_steps", ["-1"], "must be at least 0"),
    ("guards.judge_check_sample", ["0"], "must be at least 1"),
    ("guards.largest_gap_growth", ["-0.1", "1.5", ".nan"], "must be from 0 to 1"),
    ("guards.largest_canary_score", ["-1", "50"], "must be from 0 to 1"),
    ("guards.judge_check_timeout_s", ["0", ".inf"], "must be above 0"),
    ("guards.held_out_judge_model", ["{model_name_or_path: Qwen/Qwen3-4B}"], "must be behind an API"),
    ("guards.held_out_judge_model", ["{base_url: x}"], "must begin with http"),
    ("reward_model.model_name_or_path", ["''"], "it is Answer, None, or the name or folder"),
    ("reward_model.vllm.max_length", ["1"], "must be at least 2"),
    ("train.number_of_problems_per_batch", ["0", "-8"], "must be at least 1"),
    ("train.num_samples_per_problem", ["1", "0"], "needs at least 2"),
    ("train.per_device_train_batch_size", ["0", "-16"], "must be at least 1"),
    ("train.max_tokens_per_micro_batch", ["0", "-16"], "must be at least 1"),
    ("train.learning_rate", ["-1"], "must be at least 0"),
    ("train.learning_rate", [".nan", ".inf", "-.inf"], "must be at least 0, and finite"),
    ("train.learning_rate", ["2000"], "must be at most 1000"),
    ("train.lr_scheduler_type", ["cos"], "must be one of linear, cosine"),
    ("train.optimizer", ["adam", "muon"], "must be one of adamw_torch"),
    ("train.beta", ["-0.1"], "must be at least 0"),
    ("train.mu", ["0"], "must be at least 1"),
    ("train.epsilon", ["0", "-0.2"], "must be above 0"),
    ("train.epsilon_high", ["0"], "must be above 0"),
    ("train.gpu_memory_gib", ["0", "-1"], "must be above 0"),
    ("train.loss_type", ["ppo", "GRPO", "my.loss", ":loss", "a..b:f", "my loss:f", "a:f()"], "must be one of grpo"),
    ("train.scale_rewards", ["yes", "std"], "must be one of group"),
    ("train.max_grad_norm", ["-1"], "must be at least 0"),
    ("train.dtype", ["fp16", "float64"], "must be one of float32"),
    ("train.reward_weights", ["{pedagogical: .nan}"], "must be a finite number"),
    ("train.importance_sampling_mode", ["token"], "must be one of token_truncate"),
    ("train.importance_sampling_clip_max", ["0"], "must be above 0"),
    ("train.groups_without_variance", ["skip"], "must be one of keep, drop, resample"),
    ("train.resample_up_to", ["0.5", ".nan"], "must be at least 1"),
    ("train.max_staleness", ["-1", "2"], "must be from 0 to 1"),
    ("train.publish_through", ["ram"], "must be one of disk, memory"),
    ("train.publish_to_disk_every", ["0"], "must be at least 1"),
    ("train.gpu_memory_gib", ["0", "-80"], "must be above 0"),
    ("train.keep_published_policies", ["0"], "must be at least 1"),
    ("train.turn_credit.mode", ["sum"], "must be one of none, immediate, to_go, progress"),
    ("train.turn_credit.weight", ["-0.3", ".inf"], "must be at least 0"),
    ("train.turn_credit.gamma", ["-0.1", "1.1", ".nan"], "must be from 0 to 1"),
    ("train.corrections.mode", ["sft"], "must be one of none, same_step, pass"),
    ("train.corrections.weight", ["-1", ".nan"], "must be at least 0"),
    ("train.corrections.interval", ["0"], "must be at least 1"),
    ("train.corrections.min_examples", ["0"], "must be at least 1"),
    ("train.corrections.epochs", ["0"], "must be at least 1"),
    ("train.corrections.learning_rate", ["-1e-5", ".nan", "2000"], "must be at (least 0|most 1000)"),
    ("train.corrections.max_kl", ["0", "-1", ".inf"], "must be above 0"),
    ("train.corrections.capacity", ["0"], "must be at least 1"),
    ("train.corrections.replay", ["-0.5"], "must be at least 0"),
    ("train.corrections.rows_per_batch", ["0", "-4"], "must be at least 1"),
    ("train.corrections.pass_batch_size", ["0", "-4"], "must be at least 1"),
    ("train.algorithm", ["reinforce", "PPO"], "must be one of grpo, ppo"),
    ("train.ppo.gamma", ["-0.1", "1.01", ".nan"], "must be from 0 to 1"),
    ("train.ppo.lam", ["-0.1", "2"], "must be from 0 to 1"),
    ("train.ppo.value_lam", ["-0.1", ".inf"], "must be from 0 to 1"),
    ("train.ppo.head", ["MLP", "null"], "must be one of linear, mlp"),
    ("train.ppo.gae_over", ["message"], "must be one of tokens, turns"),
    ("train.ppo.value_learning_rate", ["-1", ".nan", "2000"], "must be at (least 0|most 1000)"),
    ("train.ppo.value_weight", ["-0.5", ".inf"], "must be at least 0"),
    ("train.ppo.value_clip", ["0", "-0.2"], "must be above 0"),
    ("train.ppo.value_warmup_steps", ["-1"], "must be at least 0"),
    ("train.ppo.entropy_weight", ["-0.01", ".nan"], "must be at least 0"),
    ("train.ppo.target_kl", ["0", "-1", ".nan"], "must be above 0"),
    ("dataset.max_train_examples", ["0", "-2"], "at least 1, or -1 for all"),
    ("logging.report_to", ["[wandbb]"], "must be one of azure_ml"),
    ("logging.save_dir", ["''"], "name the folder"),
    ("logging.save_steps", ["0", "-1"], "must be at least [01]"),
    ("skip_first_samples", ["-1"], "must be at least 0"),
    ("seed", ["-1", "4294967296"], "must be from 0 to 4294967295"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "wrong", "rule"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_with_the_rule(key, wrong, rule):
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"{key}[ .\[].*{rule}"):
            with_value(key, value)


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
    of_two_keys = {"train.epochs", "train.max_steps"}
    tested = {_of_any_role(key) for key, _, _ in OUT_OF_RANGE} | of_two_keys
    numbers = {_of_any_role(key) for key, kind in _leaves(TrainRLConfig) if _is_number(kind)}
    assert numbers == tested & numbers, "without a range"


def _of_any_role(key: str) -> str:
    return re.sub(r"^(teacher|student|judge|reward)_model\.", "model.", key)


def _leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in types_of(schema).items():
        if is_dataclass(kind):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


def _is_number(kind: Any) -> bool:
    members = get_args(kind) if get_origin(kind) is UnionType or get_origin(kind) is Union else (kind,)
    return any(member in (int, float) or getattr(member, "__origin__", None) in (int, float) for member in members)


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
    kind, taken = TypeAdapter(types_of(group)[name]), []
    for probe in PROBES:
        with suppress(ValidationError):
            kind.validate_python(probe)
            taken.append(repr(probe))
    assert ", ".join(taken) == TAKEN[group, name]


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
    taken = [kind for kind in PROBES if not isinstance(kind, list | dict) and kind is not None]
    text = TypeAdapter(types_of(LoggingConfig)["wandb_project"])
    assert [text.validate_python(value) for value in taken] == [str(value) for value in taken]
