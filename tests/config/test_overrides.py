"""Flags and overrides: what a command line makes of a configuration, and what a run writes down of it."""

from pathlib import Path

import pytest
import yaml

from config.load import ROOT, record_run, to_yaml
from tests.config.test_config import PROGRAMS, loaded, run


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
    (tmp_path / "prompt_templates").symlink_to(ROOT / "prompt_templates")
    arguments = ["--config-dir", str(tmp_path), "--config-name", "own.yaml", "logging.wandb_run_name=x"]
    printed = dry_run(program, *arguments, cwd=tmp_path)
    assert printed == yaml.safe_load(to_yaml(loaded(folder, *arguments, "dry_run=true")))
    assert (printed["seed"], printed["logging"]["wandb_run_name"]) == (7, "x")
    assert {path.name for path in tmp_path.iterdir()} == {"own.yaml", "prompt_templates"}, (
        "a dry run leaves nothing behind"
    )


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
    assert set(environment) == {"git_commit", "python", "packages", "rules_version"}
    assert environment["packages"]["torch"]
