"""Flags and overrides: what a command line makes of a configuration, and what a run writes down of it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from classroom_rl.config.load import ROOT, record_run, to_yaml
from classroom_rl.errors import ConfigError
from classroom_rl.launch.before_start import in_force
from tests.config.test_load import PROGRAMS, loaded, run


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
    assert program in ("train_sft.py", "eval.py") or "# rewards in force: " in result.stdout
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


def test_a_multirun_takes_several_texts_that_need_quotes(tmp_path):
    result = run("train_sft.py", "--multirun", "logging.save_dir=runs/lr=1,runs/Übung", "dry_run=true", cwd=tmp_path)
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


RULES, PERSONAS = "generation.judges_rules_prompts_paths", "generation.student_personas_prompts_paths"
GROUP_TEMPLATES = "judge_model.group_prompts_paths"
SHIPPED_RULES = ["does_not_leak_answer", "follows_pedagogical_values"]


@pytest.mark.parametrize(
    ("overrides", "rules"),
    [
        ([RULES + "={one_hint: a.txt}"], ["one_hint"]),
        (["+generation={judges_rules_prompts_paths: {one_hint: a.txt}}"], ["one_hint"]),
        ([RULES + "={+one_hint: a.txt}"], [*SHIPPED_RULES, "one_hint"]),
        ([RULES + ".one_hint=a.txt"], [*SHIPPED_RULES, "one_hint"]),
        ([f"~{RULES}.does_not_leak_answer", RULES + ".one_hint=a.txt"], [SHIPPED_RULES[1], "one_hint"]),
        ([RULES + "={one: a.txt}", RULES + ".two=b.txt", RULES + "={+three: c.txt}"], ["one", "two", "three"]),
        ([RULES + ".two=b.txt", RULES + "={one: a.txt}"], ["one"]),
    ],
)
@pytest.mark.parametrize("name", ["7b", "maths_small"])
def test_a_mapping_replaces_the_one_below_it_and_a_plus_adds(overrides: list[str], rules: list[str], name: str):
    assert list(loaded("train_rl", f"--config-name={name}", *overrides).generation.judge_rules) == rules


@pytest.mark.parametrize(
    ("overrides", "templates"),
    [
        ([GROUP_TEMPLATES + "={mine: a.txt}"], ["mine"]),
        ([GROUP_TEMPLATES + "={+mine: a.txt}"], ["pedagogical_eval", "mine"]),
        ([GROUP_TEMPLATES + ".mine=a.txt"], ["pedagogical_eval", "mine"]),
        ([f"~{GROUP_TEMPLATES}"], ["pedagogical_eval"]),
    ],
)
def test_a_mapping_replaces_the_default_of_the_schema_too(overrides: list[str], templates: list[str]):
    overrides = [GROUP_TEMPLATES + "={gone: a.txt}", *overrides] if overrides[0].startswith("~") else overrides
    assert list(loaded("train_rl", *overrides).judge_model.group_prompts_paths) == templates


def test_a_file_replaces_the_mappings_of_the_file_that_it_builds_on(tmp_path: Path):
    """Personas, their weights (a key of any type) and rewards, over one more file of the user's own."""
    (tmp_path / "first.yaml").write_text(
        "defaults: [language_tutor, _self_]\n"
        "train: {reward_weights: {pedagogical: 1.0}}\n"
        "generation: {student_error_rate: {correct_student: 1, error_student: 1}}\n"
    )
    (tmp_path / "second.yaml").write_text(
        "defaults: [first, _self_]\n"
        "train: {reward_weights: {+length: 0.5}}\n"
        "generation:\n  student_personas_prompts_paths: {shy: prompt_templates/personas/simple_student.txt}\n"
        "  student_error_rate: {shy: 1}\n"
    )
    config = loaded("train_rl", f"--config-dir={tmp_path}", "--config-name=second")
    assert list(config.generation.student_personas_prompts_paths) == ["shy"]
    assert config.generation.student_error_rate == {"shy": 1}
    assert config.train.reward_weights == {"pedagogical": 1.0, "length": 0.5}
    own = ["--config-dir", str(tmp_path), "--config-name", "second", "train.reward_weights={length: 1.0}"]
    assert dry_run("train_rl.py", *own, "train.optimizer=adamw_torch")["train"]["reward_weights"] == {"length": 1.0}


def test_names_with_and_without_a_plus_are_not_mixed():
    with pytest.raises(ConfigError, match=rf"{RULES} has \+a, b: names with a plus add .* Give all of them a plus"):
        loaded("train_rl", RULES + "={+a: x, b: y}")


def test_a_mapping_that_stands_for_another_one_stays_as_hydra_makes_it(tmp_path: Path):
    (tmp_path / "own.yaml").write_text(
        "defaults: [quickstart, _self_]\n"
        "judge_model: {group_prompts_paths: '${generation.judges_rules_prompts_paths}'}\n"
    )
    config = loaded("train_rl", f"--config-dir={tmp_path}", "--config-name=own")
    assert config.judge_model.group_prompts_paths == config.generation.judges_rules_prompts_paths


def test_a_dry_run_lists_the_rules_personas_and_rewards_in_force():
    printed = run("eval.py", "--config-name=small_tutor", "dry_run=true", "server_url=null").stdout
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


@pytest.mark.parametrize("program", [*PROGRAMS, "-m classroom_rl.launch.cli"])
def test_optimized_python_is_refused_because_libraries_work_in_assert_statements(program):
    """Hydra reads dictionaries in them: train.reward_weights={…} would end in a traceback, or worse."""
    line = [*program.split(), "--config-name", "quickstart", "generation.max_turns=5", "dry_run=true"]
    done = subprocess.run([sys.executable, "-OO", *line], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: Python runs optimized (-OO, or PYTHONOPTIMIZE=2)" in done.stderr
    assert "Start the program without -O, and with PYTHONOPTIMIZE unset." in done.stderr
