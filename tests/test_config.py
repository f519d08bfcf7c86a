"""Configurations: every shipped one loads, every key is read, and a mistake is named."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from config.checks import check_train_rl
from config.eval_model import EvalConfig, check_eval
from config.load import load, record_run, to_yaml
from config.train_rl_model import TrainRLConfig
from config.train_sft_model import OPTIMIZERS, SCHEDULERS, TrainSFTConfig, check_train_sft
from src.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
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
        timeout=120,
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
    assert path.parent.name in (*SCHEMAS, "deepspeed")
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_optimizers_and_schedulers_on_offer_are_those_of_transformers():
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    assert set(OPTIMIZERS) - {"muon"} <= {name.value for name in OptimizerNames}
    assert set(SCHEDULERS) <= {name.value for name in SchedulerType}


# Every key is read --------------------------------------------------------------------------------------------------


def schema_fields(schema: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key with its dots, name) of every field of a schema, inside lists of groups too."""
    for item in fields(schema):
        yield prefix + item.name, item.name
        for inner in (item.type, *get_args(item.type)):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from schema_fields(inner, f"{prefix}{item.name}.")


def attributes_read() -> set[str]:
    """Every name that the code reads as an attribute. To check a value is not to use it: checks do not count."""
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / name for name in PROGRAMS), *(ROOT / "config").glob("*.py")]
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
        ("train_rl", "train.xyzzy=1", r"no config key train\.xyzzy\. There are: number_of_problems_per_batch, "),
        ("train_sft", "model.max_len=1", r"Did you mean model\.max_length\?"),
        ("eval", "sampling=[greedy]", r"Did you mean samplings\?"),
        ("train_rl", "train.learning_rate=fast", r"train\.learning_rate: .*'fast'.* Float"),
        ("train_rl", "generation.max_turns=2.5", r"generation\.max_turns: .*2\.5.* Integer"),
        ("train_rl", "teacher_model.vllm.enforce_eager=maybe", r"teacher_model\.vllm\.enforce_eager: .*maybe.* bool"),
        ("train_rl", "train=fast", r"Config key train is 'fast', but it is a group of keys"),
        ("train_rl", "teacher_model.vllm=7", r"Config key teacher_model\.vllm is 7, but it is a group"),
        ("train_rl", "dataset.train_datasets=[{name_or_pat: x}]", r"mean dataset\.train_datasets\[\]\.name_or_path\?"),
        ("train_rl", "dataset.train_datasets=[{name: x}]", r"key name\. There are: name_or_path, split, ratio, "),
        ("train_rl", "logging.save_dir=${nowhere.else}", r"nowhere\.else"),
        ("train_rl", "generation.max_turns=0", r"generation\.max_turns is 0; it counts messages"),
        ("train_sft", "train.optimizer=adamw_hf", r"train\.optimizer is adamw_hf; it must be one of muon, adamw_torch"),
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


def test_a_yaml_that_does_not_parse_is_an_error(tmp_path):
    (tmp_path / "broken.yaml").write_text("train: {learning_rate: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match="broken.yaml"):
        loaded("train_rl", "--config-dir", str(tmp_path), "--config-name", "broken")


# Flags and overrides ------------------------------------------------------------------------------------------------


def test_overrides_count_whether_the_yaml_names_the_key_or_not():
    config = loaded("train_rl", "train.epsilon_high=0.28", "train.reward_weights={pedagogical: 2.0}", "+seed=3")
    assert (config.train.epsilon_high, config.train.reward_weights, config.seed) == (0.28, {"pedagogical": 2.0}, 3)


@pytest.mark.parametrize("name", ["own", "own.yaml"])
def test_a_folder_of_ones_own_can_build_on_what_is_shipped(tmp_path, name):
    (tmp_path / "own.yaml").write_text("defaults: [quickstart, _self_]\nseed: 7\n")
    config = loaded("train_rl", f"--config-dir={tmp_path}", "--config-name", name, "train.mu=3")
    assert (config.seed, config.train.mu) == (7, 3)
    config.seed, config.train.mu = loaded("train_rl").seed, loaded("train_rl").train.mu
    assert config == loaded("train_rl")


def dry_run(program: str, *arguments: str, cwd: Path = ROOT) -> dict:
    result = run(program, *arguments, "dry_run=true", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return yaml.safe_load(result.stdout)


@pytest.mark.parametrize("program", PROGRAMS)
def test_dry_run_prints_the_config_that_the_launcher_sees_and_ends_well(program, tmp_path):
    folder = program.removesuffix(".py").replace("vllm_server", "train_rl")
    (tmp_path / "own.yaml").write_text("defaults: [quickstart, _self_]\nseed: 7\n")
    arguments = ["--config-dir", str(tmp_path), "--config-name", "own.yaml", "logging.wandb_run_name=x"]
    printed = dry_run(program, *arguments, cwd=tmp_path)
    assert printed == yaml.safe_load(to_yaml(loaded(folder, *arguments, "dry_run=true")))
    assert (printed["seed"], printed["logging"]["wandb_run_name"]) == (7, "x")
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"], "a dry run leaves nothing behind"


def test_a_shipped_name_means_the_shipped_file_for_programs_and_launcher_alike(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("seed: 8\n")
    arguments = ["--config-dir", str(tmp_path)]
    assert dry_run("train_rl.py", *arguments)["seed"] == loaded("train_rl", *arguments).seed == 42


def test_a_mistake_ends_a_program_with_status_2_and_a_message_without_a_traceback():
    result = run("train_sft.py", "train.learning_rat=1e-3")
    assert result.returncode == 2
    assert "error: There is no config key train.learning_rat. Did you mean train.learning_rate?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_multirun_gives_each_run_a_folder_of_its_own(tmp_path):
    result = run("train_sft.py", "--multirun", "train.learning_rate=1e-3,1e-4", "dry_run=true", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    printed = result.stdout
    assert printed.count("save_dir: runs/quickstart/sft/0\n") == printed.count("save_dir: runs/quickstart/sft/1\n") == 1
    assert printed.count("learning_rate: 0.001\n") == printed.count("learning_rate: 0.0001\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["multirun"]


def test_a_run_writes_down_its_config_commit_and_packages(tmp_path):
    config = loaded("train_sft", f"logging.save_dir={tmp_path / 'run'}")
    folder = record_run(config, "train_sft")
    assert folder == tmp_path / "run"
    assert yaml.safe_load((folder / "config/train_sft.yaml").read_text()) == yaml.safe_load(to_yaml(config))
    environment = yaml.safe_load((folder / "config/train_sft.environment.json").read_text())
    assert set(environment) == {"git_commit", "python", "packages"}
    assert environment["packages"]["torch"]


# What importing costs -----------------------------------------------------------------------------------------------


def test_the_pure_core_imports_neither_torch_nor_vllm_nor_deepspeed():
    modules = sorted(f"config.{path.stem}" for path in (ROOT / "config").glob("[a-z]*.py"))
    modules += ["src.conversation", "src.judging", "src.rewards", "src.schedule", "src.turns", "src.api", "src.data"]
    script = (
        f"import sys, {', '.join(modules)}\n"
        "heavy = {'torch', 'vllm', 'deepspeed', 'transformers', 'trl', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
