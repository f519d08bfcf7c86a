"""Configurations: every shipped one loads, the code reads every key, and each mistake is reported with its key."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from omegaconf import OmegaConf

from classroom_rl.config import values
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.fields import Range, group_in, metadata_of, types_of, values_of
from classroom_rl.config.load import ROOT, load, to_yaml, validate
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig, check_train_sft
from classroom_rl.errors import ConfigError
from classroom_rl.launch.commands import ACCELERATE_CONFIGS

SCHEMAS = {
    "train_rl": (TrainRLConfig, check_train_rl),
    "train_sft": (TrainSFTConfig, check_train_sft),
    "eval": (EvalConfig, check_eval),
}
PROGRAMS = ("vllm_server.py", "train_rl.py", "train_sft.py", "eval.py")
SHIPPED = sorted(
    (path.parent.name, path.name) for folder in SCHEMAS for path in (ROOT / "config" / folder).glob("*.yaml")
)


def loaded(folder: str, *arguments: str) -> Any:
    schema, check = SCHEMAS[folder]
    return load(schema, folder, arguments, check)


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / arguments[0]), *arguments[1:]],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


# What is shipped ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "name"), SHIPPED)
def test_every_shipped_config_loads_and_passes_its_checks(folder, name):
    config = loaded(folder, "--config-name", name)
    assert loaded(folder, "--config-name", name.removesuffix(".yaml")) == config
    assert isinstance(config, SCHEMAS[folder][0])


@pytest.mark.parametrize("folder", SCHEMAS)
def test_each_program_has_a_quickstart(folder):
    assert (folder, "quickstart.yaml") in SHIPPED


@pytest.mark.parametrize("folder", SCHEMAS)
def test_the_written_config_loads_again_as_the_same(folder, tmp_path):
    config = loaded(folder, "seed=17", "logging.wandb_tags=[a,b]")
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert loaded(folder, "--config-dir", str(tmp_path), "--config-name", "again") == config


@pytest.mark.parametrize(
    "path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_yaml_belongs_to_a_program_and_parses(path):
    assert path.parent.name in (*SCHEMAS, *ACCELERATE_CONFIGS)
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_names_on_offer_are_those_of_the_libraries():
    import inspect

    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames
    from trl import GRPOConfig, GRPOTrainer
    from vllm.config.model import ModelDType

    assert set(get_args(values.Optimizer)) <= {name.value for name in OptimizerNames}
    assert set(get_args(values.Scheduler)) <= {name.value for name in SchedulerType}
    assert set(get_args(values.Tracker)) == set(INTEGRATION_TO_CALLBACK)
    assert set(get_args(values.EngineDtype)) <= set(get_args(ModelDType))
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    sampled = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert all(f'"{name}"' in loss for name in get_args(values.LossType))
    assert all(
        f'"{name}"' in sampled for name in (*get_args(values.ImportanceSamplingMode), *get_args(values.RewardScale))
    )
    shipped = GRPOConfig.__dataclass_fields__
    assert shipped["loss_type"].default in get_args(values.LossType)
    assert shipped["vllm_importance_sampling_mode"].default in modes


# Every key is read --------------------------------------------------------------------------------------------------


def schema_fields(schema: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key with its dots, name) of every field of a schema, inside lists of groups too."""
    for name, kind in types_of(schema).items():
        yield prefix + name, name
        group = group_in(kind)
        if group is not None:
            yield from schema_fields(group, f"{prefix}{name}.")


def attributes_read() -> set[str]:
    """Every name that the code reads as an attribute. To check a value is not to use it: checks do not count."""
    sources = (ROOT / "src").rglob("*.py")
    statements = [node for path in sources for node in ast.parse(path.read_text(encoding="utf-8")).body]
    used = [node for node in statements if not getattr(node, "name", "").lstrip("_").startswith("check")]
    nodes = (inner for node in used for inner in ast.walk(node))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("folder", SCHEMAS)
def test_every_key_of_the_schema_is_read_by_the_code(folder):
    read = attributes_read()
    unread = [key for key, name in schema_fields(SCHEMAS[folder][0]) if name not in read]
    assert not unread, f"keys that nothing reads: {', '.join(unread)}"


@pytest.mark.parametrize("folder", SCHEMAS)
def test_every_schema_can_be_run_dry_and_has_a_run_folder(folder):
    keys = {key for key, _ in schema_fields(SCHEMAS[folder][0])}
    assert {"dry_run", "logging.save_dir", "seed"} <= keys


# Mistakes -----------------------------------------------------------------------------------------------------------


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
        ("train_rl", "teacher_model.vllm.enforce_eager=maybe", r"vllm\.enforce_eager is maybe; it must be true or false"),
        ("train_rl", "train=fast", r"Config key train is 'fast', but it is a group of keys"),
        ("train_rl", "train=[1]", r"Config key train is \[1\], but it is a group of keys"),
        ("train_rl", "=5", r"=5 is no override: there is no key before the =\. Write key=value"),
        ("train_rl", "logging.wandb_tags=[[1]]", r"logging\.wandb_tags\[0\] is \[1\]; it must be a text"),
        ("train_rl", "teacher_model.vllm=7", r"Config key teacher_model\.vllm is 7, but it is a group"),
        ("train_rl", "dataset.train_datasets=[{name_or_pat: x}]", r"mean dataset\.train_datasets\[\]\.name_or_path\?"),
        ("train_rl", "dataset.train_datasets=[{name: x}]", r"datasets\[0\]\.name\. There are: name_or_path, split, ratio, "),
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
    ("train.loss_type", ["ppo", "GRPO"], "must be one of grpo"),
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


def test_a_teacher_without_temperature_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="temperature is 0.*every conversation of a group would be the same"):
        loaded("train_rl", "teacher_model.vllm.temperature=0")


def test_more_samples_than_a_server_holds_are_refused_with_all_numbers():
    sizes = ("number_of_problems_per_batch=1024", "num_samples_per_problem=8")
    with pytest.raises(ConfigError, match=r"\(1024 × 8 = 8192\) is more than the 4096 conversations"):
        loaded("train_rl", *(f"train.{size}" for size in sizes))


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


def test_a_judge_has_one_address_and_is_given_up_before_the_batch_is():
    with pytest.raises(ConfigError, match="use_openrouter and judge_model.use_gemini are both set"):
        loaded("train_rl", "judge_model.use_openrouter=true", "judge_model.use_gemini=true")
    patient = ("judge_model.use_openrouter=true", "judge_model.deadline_s=100", "generation.sample_timeout_s=100")
    for folder, here in (("train_rl", ()), ("eval", ("server_url=null",))):
        with pytest.raises(ConfigError, match=r"deadline_s is 100; it must be less than generation.sample_timeout_s"):
            loaded(folder, *patient, *here)


def test_a_batch_that_does_not_divide_is_refused_with_all_numbers():
    sizes = ("number_of_problems_per_batch=16", "num_samples_per_problem=8", "per_device_train_batch_size=7")
    with pytest.raises(ConfigError, match=r"\(16 × 8 = 128\) must be divisible by .*\(7\)"):
        loaded("train_rl", *(f"train.{size}" for size in sizes))


def test_epochs_and_steps_cannot_both_be_nothing():
    with pytest.raises(ConfigError, match="train.epochs is 0 and train.max_steps -1: nothing would be trained"):
        loaded("train_sft", "train.epochs=0", "train.max_steps=-1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-name", "nowhere"], "Cannot find primary config 'nowhere'"),
        (["--config-name"], "--config-name needs a value"),
        (["--config-dir", "no/such/folder"], "There is no folder no/such/folder"),
    ],
)
def test_a_wrong_flag_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        loaded("train_rl", *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"train: {learning_rate: 1\nseed: 2\n", r'broken\.yaml", line 2'),
        (b"seed: 1\nseed: 2\n", r'found duplicate key seed\n.*broken\.yaml", line 2'),
        (b"seed:\t- 1\n", r'broken\.yaml", line 1'),
        (b"a: !!python/object/apply:os.system [exit]\n", "could not determine a constructor for the tag"),
        (b"# caf\xe9\nseed: 1\n", "A configuration file is not UTF-8: .* after '# caf'. Save it as UTF-8"),
        (b"- a\n", "must be a DictConfig, got ListConfig"),
        (b"generation: [1]\n", r"Config key generation is \[1\], but it is a group of keys"),
        (b"generation: {max_turns: null}\n", "generation.max_turns is None; it must be a whole number"),
        (b"seed: ${oc.env:NO_SUCH_VARIABLE}\n", "key seed: .*NO_SUCH_VARIABLE"),
        (b"defaults: [nowhere]\n", "nowhere"),
    ],
)
def test_a_yaml_that_does_not_parse_is_an_error(tmp_path, text, message):
    (tmp_path / "broken.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        loaded("train_rl", "--config-dir", str(tmp_path), "--config-name", "broken")


@pytest.mark.parametrize("text", [b"train: {learning_rate: 1\nseed: 2\n", b"# caf\xe9\nseed: 1\n"])
def test_a_yaml_that_does_not_parse_ends_a_program_with_a_message(tmp_path, text):
    (tmp_path / "broken.yaml").write_bytes(text)
    result = run("vllm_server.py", "--config-dir", str(tmp_path), "--config-name", "broken")
    assert result.returncode == 2 and "error: " in result.stderr and "Traceback" not in result.stderr
