"""Which YAML a program takes and logs, and the defaults of a configuration that names models only."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from classroom_rl.config.checks import check_train_rl, reward_weights
from classroom_rl.config.load import ROOT, command_line, load, to_yaml
from classroom_rl.config.maths_classroom import MATHS_CLASSROOM, MATHS_DATASET
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.launch.cli import main as launcher
from classroom_rl.launch.quickstart import main as quickstart
from classroom_rl.system.startup import OPENMP_VARIABLES, SHORT_WAIT

# Which file ---------------------------------------------------------------------------------------------------------


def own_file(folder: Path, text: str, name: str = "quickstart") -> list[str]:
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return ["--config-dir", str(folder), "--config-name", name]


def train_rl(*arguments: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", arguments, check_train_rl)


def dry_run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / program), *arguments, "dry_run=true"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("program", ["vllm_server.py", "train_rl.py", "train_sft.py", "eval.py"])
def test_a_file_of_ones_own_comes_before_the_shipped_one_of_its_name_and_is_named(program, tmp_path):
    folder = program.removesuffix(".py").replace("vllm_server", "train_rl")
    shipped = (ROOT / "config" / folder / "quickstart.yaml").read_text(encoding="utf-8")
    arguments = own_file(tmp_path, f"{shipped}\nseed: 8\n")
    result = dry_run(program, *arguments)
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout)["seed"] == 8
    assert result.stdout.startswith(f"# configuration: {tmp_path / 'quickstart.yaml'}\n")
    assert f"configuration: {tmp_path / 'quickstart.yaml'}" in result.stderr, "as at every start"
    assert command_line(folder, arguments).file == tmp_path / "quickstart.yaml"
    assert command_line(folder, arguments[2:]).file == ROOT / "config" / folder / "quickstart.yaml"


def test_the_launcher_takes_the_same_file_and_names_it(tmp_path, capsys):
    shipped = (ROOT / "config/train_rl/quickstart.yaml").read_text(encoding="utf-8")
    arguments = own_file(tmp_path, f"{shipped}\nseed: 8\n")
    assert launcher([*arguments, "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"# configuration: {tmp_path / 'quickstart.yaml'}\n") and "\nseed: 8\n" in shown


def test_the_quickstart_names_the_files_of_its_programs(tmp_path, capsys):
    assert quickstart([f"logging.save_dir={tmp_path / 'run'}", "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    for folder in ("train_rl", "train_sft", "eval"):
        assert f"# configuration: {ROOT / 'config' / folder / 'quickstart.yaml'}\n" in shown


def test_a_file_may_build_on_others_of_its_folder_and_on_shipped_ones(tmp_path):
    own_file(tmp_path, "defaults: [quickstart, _self_]\nseed: 8\n", "base")
    arguments = own_file(tmp_path, "defaults: [base, _self_]\ntrain: {mu: 3}\n", "mine")
    config = train_rl(*arguments)
    assert (config.seed, config.train.mu, config.judge_model.model_name_or_path) == (8, 3, "rubric")


def test_a_file_that_builds_on_its_own_name_is_told_to_take_another(tmp_path):
    arguments = own_file(tmp_path, "defaults: [quickstart, _self_]\nseed: 8\n")
    with pytest.raises(ConfigError, match="names itself in its defaults.*Give yours another name"):
        train_rl(*arguments)


def test_files_that_build_on_each_other_are_refused(tmp_path):
    own_file(tmp_path, "defaults: [second]\n", "first")
    with pytest.raises(ConfigError, match="lead back to where they began"):
        train_rl(*own_file(tmp_path, "defaults: [first]\n", "second"))


@pytest.mark.parametrize("name", ["mine[1]", "mine*", "mine?", "a b", "ü"])
def test_a_name_is_no_pattern(tmp_path, name):
    own_file(tmp_path, "defaults: [quickstart, _self_]\nseed: 9\n", "mine1")
    assert train_rl(*own_file(tmp_path, "defaults: [quickstart, _self_]\nseed: 8\n", name)).seed == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-name", "a" * 300], "--config-name is aaaa.*name has at most 255"),
        (["--config-dir", "b" * 300], "--config-dir is bbbb.*name has at most 255"),
        (["--config-name", "a\0b"], "NUL character"),
        (["--config-path", "conf"], "--config-path cannot be given here. Use --config-dir"),
        (["--experimental-rerun", "x.pickle"], "--experimental-rerun cannot be given here. It reads a pickle"),
    ],
)
def test_flags_that_name_no_file_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        train_rl(*arguments)


# The maths classroom ------------------------------------------------------------------------------------------------

MODELS_ALONE = """
train: {number_of_problems_per_batch: 4, num_samples_per_problem: 4, learning_rate: 1e-6, beta: 0.002, mu: 1,
        optimizer: adamw_hf, batch_size_ref_model: 4, save_policy_to_disk_every_n: 1}
teacher_model:
  model_name_or_path: some/teacher
  vllm: {temperature: 0.8, max_length: 10000, max_num_seqs: 128, gpu_memory_utilization: 0.3, enforce_eager: true,
         number_of_gpus_per_instance: 2, max_number_of_instances: -1, load_and_unload: true, use_v0: true}
student_model:
  model_name_or_path: some/student
  vllm: {temperature: 0.5, max_length: 10000, max_number_of_instances: -1, from_0: true, bits_and_bytes: false}
judge_model:
  model_name_or_path: some/judge
  vllm: {temperature: 0.5, max_length: 10000, enable_sleep_mode: true, load_and_unload: false}
reward_model: {model_name_or_path: Answer}
huggingface: {name: <name>, push_to_hub: false}
logging: {wandb: true, wandb_project: mine, wandb_run_name: hard, run_group: own, wandb_tags: [own], save_steps: 5}
generation:
  extra_penalty_for_rejected_judges: 0.75
  use_experimental_shared_memory: false
"""


def test_a_training_that_names_models_alone_is_one_of_the_maths_tutor_and_that_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        config = train_rl(*own_file(tmp_path, MODELS_ALONE, "of_another_trainer"))
    own = {name: getattr(config.generation, name) for name in MATHS_CLASSROOM}
    assert own == MATHS_CLASSROOM
    assert [source.name_or_path for source in config.dataset.train_datasets] == [MATHS_DATASET]
    assert config.generation.extra_penalty_for_rejected_judges == 0.75 and not config.generation.ignore_rejected_judge
    assert {"end_rm", "thinking", "length"} <= set(reward_weights(config))
    said = next(record.getMessage() for record in caplog.records if "maths classroom" in record.getMessage())
    assert all(f"generation.{name}=" in said for name in MATHS_CLASSROOM) and MATHS_DATASET in said
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert train_rl("--config-dir", str(tmp_path), "--config-name", "again") == config


def test_the_shipped_file_of_the_paper_has_the_classroom_that_is_filled_in(tmp_path):
    """But for the prompt of evaluations alone."""
    shipped = train_rl("--config-name", "7b").generation
    filled = train_rl(*own_file(tmp_path, MODELS_ALONE, "own")).generation
    for name in set(MATHS_CLASSROOM) - {"student_attempt_prompt_path"}:
        assert getattr(shipped, name) == getattr(filled, name)


def test_what_is_filled_in_is_there_and_is_said_when_a_program_starts(tmp_path):
    for name in MATHS_CLASSROOM.values():
        for path in name.values() if isinstance(name, dict) else [name]:
            assert (ROOT / path).is_file()
    taking_turns = "generation.schedule=phased"  # its engines ask for more than one GPU together
    result = dry_run("vllm_server.py", *own_file(tmp_path, MODELS_ALONE, "own"), taking_turns, HF_HUB_OFFLINE="1")
    assert result.returncode == 0, result.stderr
    assert "they are those of the maths classroom: generation.teacher_prompt_path=prompt_templates/" in result.stderr
    assert yaml.safe_load(result.stdout)["dataset"]["train_datasets"][0]["name_or_path"] == MATHS_DATASET


def test_no_judges_stay_no_judges(tmp_path):
    text = MODELS_ALONE + "  number_judge_attempts: 0\n  judges_rules_prompts_paths: {}\n"
    generation = train_rl(*own_file(tmp_path, text, "own")).generation
    assert generation.judges_rules_prompts_paths == {} and generation.judge_rules == {}
    assert generation.teacher_prompt_path == MATHS_CLASSROOM["teacher_prompt_path"]


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_key_of_such_files_is_taken_for_the_one_that_it_stands_for(tmp_path, caplog, value):
    text = f"{MODELS_ALONE}  ignore_penalty_for_rejected_judges: {value}\n"
    with caplog.at_level(logging.WARNING):
        config = train_rl(*own_file(tmp_path, text, "own"))
    assert config.generation.ignore_rejected_judge == (value == "true")
    assert "ignore_penalty_for_rejected_judges is taken as generation.ignore_rejected_judge" in caplog.text


PARTS = {
    "generation.teacher_prompt_path": "  teacher_prompt_path: prompt_templates/teacher_prompt.txt\n",
    "generation.student_personas_prompts_paths": "  student_personas_prompts_paths: {simple_student: x.txt}\n",
    "generation.judges_rules_prompts_paths": "  judges_rules_prompts_paths: {does_not_leak_answer: x.txt}\n",
    "dataset.train_datasets": "dataset: {train_datasets: [{name_or_path: mine.jsonl}]}\n",
}


@pytest.mark.parametrize("named", PARTS)
def test_a_part_of_a_classroom_is_refused_with_what_is_missing(tmp_path, named):
    with pytest.raises(ConfigError) as refused:
        train_rl(*own_file(tmp_path, MODELS_ALONE + PARTS[named], "own"))
    missing = ", ".join(key for key in PARTS if key != named)
    assert f"names {named}, but not {missing}. Name the rest, too, or none of them" in str(refused.value)


@pytest.mark.parametrize("left_out", PARTS)
def test_so_is_all_of_it_but_one(tmp_path, left_out):
    text = MODELS_ALONE + "".join(text for key, text in PARTS.items() if key != left_out)
    with pytest.raises(ConfigError, match=rf", but not {left_out}\. Name the rest"):
        train_rl(*own_file(tmp_path, text, "own"))


def test_a_rule_that_scores_brings_its_lessons_and_is_not_a_part(tmp_path, caplog):
    text = MODELS_ALONE + (
        "  teacher_prompt_path: prompt_templates/teacher_language_prompt.txt\n"
        "  student_personas_prompts_paths: {simple_student: prompt_templates/personas/simple_student.txt}\n"
        "  judges_rules_prompts_paths: {pedagogical_eval: prompt_templates/judges/language_tutor_eval.txt}\n"
    )
    with caplog.at_level(logging.WARNING):
        config = train_rl(*own_file(tmp_path, text, "own"))
    assert [source.name_or_path for source in config.dataset.train_datasets] == ["data/lesson_plans/train.jsonl"]
    assert "maths classroom" not in caplog.text


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
