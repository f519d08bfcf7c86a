"""Programs and their configurations: what is shipped, keys that are read, and what a run writes down."""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from classroom_rl.config.fields import group_in, types_of
from classroom_rl.config.load import ROOT, program, record_run, to_yaml
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.launch.before_start import in_force
from classroom_rl.launch.commands import ACCELERATE_CONFIGS
from classroom_rl.system.startup import OPENMP_VARIABLES, SHORT_WAIT
from tests.support.configs import BASE, PROGRAMS, SCHEMAS, loaded, own_file
from tests.support.programs import run_program

SHIPPED = sorted(
    (path.parent.name, path.name) for folder in SCHEMAS for path in (ROOT / "config" / folder).glob("*.yaml")
)


@pytest.mark.parametrize(("folder", "name"), SHIPPED)
def test_every_shipped_config_loads_and_passes_its_checks(folder, name):
    config = loaded(folder, "--config-name", name)
    assert loaded(folder, "--config-name", name.removesuffix(".yaml")) == config
    assert isinstance(config, SCHEMAS[folder][0])


@pytest.mark.parametrize("folder", SCHEMAS)
def test_the_written_config_loads_again_as_the_same(folder, tmp_path):
    config = loaded(folder, "seed=17", "logging.wandb_tags=[a,b]")
    assert loaded(folder, *own_file(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize(
    "path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_yaml_belongs_to_a_program_and_parses(path):
    assert path.parent.name in (*SCHEMAS, *ACCELERATE_CONFIGS)
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def schema_fields(schema: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key with its dots, name) of every field of a schema, inside lists of groups too."""
    for name, kind in types_of(schema).items():
        yield prefix + name, name
        group = group_in(kind)
        if group is not None:
            yield from schema_fields(group, f"{prefix}{name}.")


@cache
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


def dry_run(program: str, *arguments: str, cwd: Path = ROOT) -> dict:
    result = run_program(program, *arguments, "dry_run=true", cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert program in ("train_sft.py", "train_preferences.py", "eval.py") or "# rewards in force: " in result.stdout
    return yaml.safe_load(result.stdout)


@pytest.mark.parametrize("program", PROGRAMS)
def test_dry_run_prints_the_config_that_the_launcher_sees_and_ends_well(program, tmp_path):
    folder = program.removesuffix(".py").replace("vllm_server", "train_rl")
    (tmp_path / "prompt_templates").symlink_to(ROOT / "prompt_templates")
    arguments = [*own_file(tmp_path, f"{BASE}seed: 7\n"), "logging.wandb_run_name=x"]
    printed = dry_run(program, *arguments, cwd=tmp_path)
    assert printed == yaml.safe_load(to_yaml(loaded(folder, *arguments, "dry_run=true")))
    assert (printed["seed"], printed["logging"]["wandb_run_name"]) == (7, "x")
    assert {path.name for path in tmp_path.iterdir()} == {"own.yaml", "prompt_templates"}, (
        "a dry run leaves nothing behind"
    )


def test_a_mistake_ends_a_program_with_status_2_and_a_message_without_a_traceback():
    result = run_program("train_sft.py", "train.learning_rat=1e-3")
    assert result.returncode == 2
    assert "error: There is no config key train.learning_rat. Did you mean train.learning_rate?" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("level", "status", "said"), [("", 0, " INFO "), ("WARNING", 0, ""), ("loud", 2, "error: ")])
def test_the_environment_sets_the_level_of_the_log(level: str, status: int, said: str) -> None:
    result = run_program("train_sft.py", "dry_run=true", CLASSROOM_LOG_LEVEL=level)
    assert result.returncode == status and said in result.stderr
    assert (" INFO " in result.stderr) == (said == " INFO "), result.stderr


def test_a_multirun_gives_each_run_a_folder_of_its_own(tmp_path):
    result = run_program("train_sft.py", "--multirun", "train.learning_rate=1e-3,1e-4", "dry_run=true", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    printed = result.stdout
    assert printed.count("save_dir: runs/quickstart/sft/0\n") == printed.count("save_dir: runs/quickstart/sft/1\n") == 1
    assert printed.count("learning_rate: 0.001\n") == printed.count("learning_rate: 0.0001\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["multirun"]


def test_a_multirun_takes_several_texts_that_need_quotes(tmp_path):
    result = run_program(
        "train_sft.py", "--multirun", "logging.save_dir=runs/lr=1,runs/Übung", "dry_run=true", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert re.findall("save_dir: (.*)", result.stdout) == ["runs/lr=1/0", "runs/Übung/1"]


def test_a_run_writes_down_its_config_commit_and_packages(tmp_path):
    config = loaded("train_sft", f"logging.save_dir={tmp_path / 'run'}")
    folder = record_run(config, "train_sft")
    assert folder == tmp_path / "run"
    assert yaml.safe_load((folder / "config/train_sft.yaml").read_text()) == yaml.safe_load(to_yaml(config))
    environment = yaml.safe_load((folder / "config/train_sft.environment.json").read_text())
    assert set(environment) == {"git_commit", "python", "packages", "rules_version"}
    assert environment["packages"]["torch"]


def test_a_dry_run_lists_the_rules_personas_and_rewards_in_force():
    printed = run_program("eval.py", "--config-name=small_tutor", "dry_run=true", "server_url=null").stdout
    assert "# judge rules in force: pedagogical_eval" in printed and "# rewards in force: pedagogical × 1" in printed
    assert in_force(loaded("train_rl", "--config-name=quickstart_supervised")) == [
        "judge rules in force: pedagogical_eval (1 × each)",
        "personas in force: correct_student 80 %, error_student 20 %",
        "rewards in force: pedagogical × 1",
        "turn rewards in force: supervisor × 1",
    ]


LEAKS = """
import multiprocessing, os, signal
from classroom_rl.config.load import _quieten_libraries
_quieten_libraries()
kept = multiprocessing.get_context("spawn").Semaphore()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("of_the_user", "said"), [(None, False), ("default", True)])
def test_what_a_killed_process_left_behind_is_removed_without_a_word(of_the_user: str | None, said: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    env |= {} if of_the_user is None else {"PYTHONWARNINGS": of_the_user}
    ended = subprocess.run([sys.executable, "-c", LEAKS], env=env, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL and ("resource_tracker" in ended.stderr) == said, ended.stderr


LOADS_TORCH = """
from classroom_rl.config.load import program
from classroom_rl.config.train_sft import TrainSFTConfig

@program(TrainSFTConfig, "train_sft")
def main(config):
    import torch

main()
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, SHORT_WAIT["GOMP_SPINCOUNT"]),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "passive"}, "0"),
        ({"KMP_BLOCKTIME": "7"}, "300000"),
    ],
)
def test_the_openmp_that_a_program_loads_waits_shortly_unless_the_user_says_how_it_waits(tmp_path, given, said):
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    result = subprocess.run(
        [sys.executable, "-c", LOADS_TORCH, "--config-name", "quickstart", f"logging.save_dir={tmp_path}"],
        cwd=ROOT,
        env=environment | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{said}'" in result.stderr, "what libgomp took, which torch loads"


def test_an_env_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Keys come from .env unless they are set already."""
    import os

    import classroom_rl.config.load as module

    (tmp_path / ".env").write_text("OPENROUTER_API_KEY=from-file\nHF_TOKEN=from-file\n", encoding="utf-8")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["x", "--help"])
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    monkeypatch.setenv("HF_TOKEN", "set")
    (tmp_path / "config" / "train_rl").mkdir(parents=True)
    (tmp_path / "config" / "train_rl" / "quickstart.yaml").write_text("seed: 1\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        program(TrainRLConfig, "train_rl")(lambda config: None)()
    assert (os.environ["OPENROUTER_API_KEY"], os.environ["HF_TOKEN"]) == ("from-file", "set")
