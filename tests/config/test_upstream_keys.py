"""docs/config_keys.md lists every key of PedagogicalRL; each loads with the listed value, and the listed tests
exist."""

import ast
import logging
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from classroom_rl.config.load import ROOT, load
from classroom_rl.config.upstream_keys import REPLACED
from classroom_rl.errors import ConfigError
from tests.support.configs import SCHEMAS, loaded

SECTIONS = {"Training": "train_rl", "Evaluation": "eval", "Fine-tuning": "train_sft"}
ROLES = ("teacher_model", "student_model", "judge_model", "reward_model")
PAGE = (ROOT / "docs/config_keys.md").read_text(encoding="utf-8")


# Names alone, from the schemas of eth-lre/PedagogicalRL; <vllm> and <lora> stand for the groups below.
VLLM = """temperature top_k top_p max_length max_num_seqs gpu_memory_utilization number_of_gpus_per_instance
max_number_of_instances from_0 load_and_unload bits_and_bytes enable_sleep_mode use_v0 enforce_eager"""
LORA = "enable rank alpha target_modules dropout bias"
GENERATION = """student_personas_prompts_paths judges_rules_prompts_paths student_initial_attempt_prompt_path
student_final_prompt_path teacher_prompt_path initial_attempt_wrapper_prompt_path student_attempt_prompt_path max_turns
max_tokens_in_conversation max_tokens_per_turn max_tokens_per_student_attempt max_tokens_per_judge_attempt
tokenizer_to_use number_student_attempts number_judge_attempts ignore_rejected_judge forced_conversation_type
use_thinking force_thinking extra_penalty_for_rejected_judges server_port use_experimental_shared_memory
student_names"""
LOGGING = "wandb wandb_project wandb_run_name wandb_entity run_group wandb_tags save_dir save_steps"
UPSTREAM = {
    "train_rl": {
        "train": """gradient_checkpointing num_samples_per_problem number_of_problems_per_batch
            per_device_train_batch_size lr_scheduler_type optimizer epochs max_steps deepspeed_config_path beta
            learning_rate mu epsilon batch_size_ref_model save_policy_to_disk_every_n""",
        "teacher_model": "model_name_or_path",
        "student_model": "model_name_or_path use_openrouter use_gemini",
        "judge_model": "model_name_or_path use_openrouter use_gemini",
        "reward_model": "model_name_or_path",
        "*.vllm": VLLM,
        "teacher_model.lora": LORA,
        "generation": GENERATION,
        "dataset": "train_datasets max_train_examples",
        "huggingface": "name push_to_hub",
        "logging": LOGGING,
        "": "skip_first_samples seed",
    },
    "eval": {
        "generation": "ignore_rejected_judge number_judge_attempts number_student_attempts student_attempt_prompt_path",
        "teacher_model": "use_openrouter use_gemini",
        "dataset": "eval_datasets max_val_examples",
        "": """num_samples_per_problem score_using_pedagogical_reward pedagogical_reward_model
            recompute_initial_attempts seed""",
    },
    "train_sft": {
        "train": """gradient_accumulation_steps gradient_checkpointing per_device_train_batch_size lr_scheduler_type
            optimizer epochs max_steps deepspeed_config_path""",
        "model": "model_name_or_path tokenizer_name_or_path max_length",
        "model.lora": LORA,
        "dataset": "train_datasets val_datasets max_train_examples max_val_examples",
        "huggingface": "name push_to_hub",
        "logging": "save_dir",
        "": "seed",
    },
}


def rows() -> list[tuple[str, str, str, str, str]]:
    """(program, key, upstream's default, what it does here, tests)"""
    table_rows, program = [], ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            program = SECTIONS[line.removeprefix("## ").partition(":")[0]]
        elif line.startswith("| ") and not line.startswith("| key |"):
            table_rows.append((program, *(cell.strip() for cell in line.strip("|").split(" | "))))
    return table_rows


ROWS = rows()


@cache
def functions_of(name: str) -> set[str]:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_key_of_upstream_stands_on_the_page_once():
    expected = [
        (program, f"{group}.{name}" if group else name)
        for program, groups in UPSTREAM.items()
        for group, names in groups.items()
        for name in names.split()
    ]
    assert sorted((program, key) for program, key, *_ in ROWS) == sorted(expected)


@pytest.mark.parametrize(("program", "key", "_default", "meaning", "tests"), ROWS)
def test_every_row_says_what_the_key_does_and_names_tests_that_exist(program, key, _default, meaning, tests):
    assert meaning
    for test in tests.split(", "):
        name, _, function = test.partition("::")
        assert function in functions_of(name), f"there is no {test}"


@pytest.mark.parametrize(("program", "key", "default", "meaning", "_tests"), ROWS)
def test_upstreams_value_loads_and_has_an_effect_unless_the_row_says_none(
    program, key, default, meaning, _tests, caplog
):
    keys = [key.replace("*", role) for role in ROLES] if key.startswith("*") else [key]
    for role_key in keys:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            config = load(SCHEMAS[program][0], program, [f"++{role_key}={default}"])
        warned = any("has no effect here" in record.getMessage() for record in caplog.records)
        assert warned == meaning.startswith("No effect"), role_key
        if not warned:
            assert reach(config, role_key) is not MISSING


MISSING = object()


def reach(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name, MISSING)
    return config


def leaves(schema: type, prefix: str = "") -> set[str]:
    hints = get_type_hints(schema)
    names = set()
    for field in fields(schema):
        kind = hints[field.name]
        name = f"{prefix}{field.name}"
        names |= leaves(kind, f"{name}.") if is_dataclass(kind) else {name}
    return names


def test_a_row_without_an_effect_is_no_key_of_the_schema():
    for program, key, _, meaning, _ in ROWS:
        keys = {key.replace("*", role) for role in ROLES}
        assert bool(keys & leaves(SCHEMAS[program][0])) != meaning.startswith("No effect"), key


@pytest.mark.parametrize("pattern", REPLACED)
def test_every_key_without_a_meaning_loads_with_one_warning(tmp_path: Path, caplog, pattern: str) -> None:
    key = pattern.replace("*", "student_model")
    with caplog.at_level(logging.WARNING):
        loaded("train_rl", f"++{key}=1")
    assert [(record.args[0], record.args[1]) for record in caplog.records] == [(key, REPLACED[pattern])]


def test_a_value_that_went_out_of_use_loads_under_its_new_name(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        config = loaded("train_sft", "train.optimizer=adamw_hf")
    assert config.train.optimizer == "adamw_torch" and "is called adamw_torch today" in caplog.text


def test_a_key_that_nobody_knows_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use_v1"):
        loaded("train_rl", "student_model.vllm.use_v1=true")
