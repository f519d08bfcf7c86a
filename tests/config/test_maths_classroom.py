"""The defaults of a configuration that names models only."""

import logging

import pytest
import yaml

from classroom_rl.config.load import ROOT, to_yaml
from classroom_rl.config.maths_classroom import MATHS_CLASSROOM, MATHS_DATASET
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.errors import ConfigError
from tests.support.configs import loaded_text, own_file, training
from tests.support.programs import run_program

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
        config = loaded_text(tmp_path, MODELS_ALONE)
    settings = {name: getattr(config.generation, name) for name in MATHS_CLASSROOM}
    assert settings == MATHS_CLASSROOM
    assert [source.name_or_path for source in config.dataset.train_datasets] == [MATHS_DATASET]
    assert config.generation.extra_penalty_for_rejected_judges == 0.75 and not config.generation.ignore_rejected_judge
    assert {"end_rm", "thinking", "length"} <= set(reward_weights(config))
    warning = next(record.getMessage() for record in caplog.records if "maths classroom" in record.getMessage())
    assert all(f"generation.{name}=" in warning for name in MATHS_CLASSROOM) and MATHS_DATASET in warning
    assert training(*own_file(tmp_path, to_yaml(config))) == config


def test_the_shipped_file_of_the_paper_has_the_classroom_that_is_filled_in(tmp_path):
    """But for the prompt of evaluations alone."""
    shipped = training("--config-name", "7b").generation
    filled = loaded_text(tmp_path, MODELS_ALONE).generation
    for name in set(MATHS_CLASSROOM) - {"student_attempt_prompt_path"}:
        assert getattr(shipped, name) == getattr(filled, name)


def test_what_is_filled_in_is_there_and_is_said_when_a_program_starts(tmp_path):
    for name in MATHS_CLASSROOM.values():
        for path in name.values() if isinstance(name, dict) else [name]:
            assert (ROOT / path).is_file()
    taking_turns = "generation.schedule=phased"  # its engines ask for more than one GPU together
    result = run_program(
        "vllm_server.py", *own_file(tmp_path, MODELS_ALONE), taking_turns, "dry_run=true", HF_HUB_OFFLINE="1"
    )
    assert result.returncode == 0, result.stderr
    assert "they are those of the maths classroom: generation.teacher_prompt_path=prompt_templates/" in result.stderr
    assert yaml.safe_load(result.stdout)["dataset"]["train_datasets"][0]["name_or_path"] == MATHS_DATASET


def test_no_judges_stay_no_judges(tmp_path):
    text = MODELS_ALONE + "  number_judge_attempts: 0\n  judges_rules_prompts_paths: {}\n"
    generation = loaded_text(tmp_path, text).generation
    assert generation.judges_rules_prompts_paths == {} and generation.judge_rules == {}
    assert generation.teacher_prompt_path == MATHS_CLASSROOM["teacher_prompt_path"]


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_key_of_such_files_is_taken_for_the_one_that_it_stands_for(tmp_path, caplog, value):
    text = f"{MODELS_ALONE}  ignore_penalty_for_rejected_judges: {value}\n"
    with caplog.at_level(logging.WARNING):
        config = loaded_text(tmp_path, text)
    assert config.generation.ignore_rejected_judge == (value == "true")
    assert "ignore_penalty_for_rejected_judges is taken as generation.ignore_rejected_judge" in caplog.text


PARTS = {
    "generation.teacher_prompt_path": "  teacher_prompt_path: prompt_templates/teacher_prompt.txt\n",
    "generation.student_personas_prompts_paths": "  student_personas_prompts_paths: {simple_student: x.txt}\n",
    "generation.judges_rules_prompts_paths": "  judges_rules_prompts_paths: {does_not_leak_answer: x.txt}\n",
    "dataset.train_datasets": "dataset: {train_datasets: [{name_or_path: mine.jsonl}]}\n",
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_classroom_is_refused_with_what_is_missing(tmp_path, part):
    rest = [key for key in PARTS if key != part]
    with pytest.raises(ConfigError) as refused:
        loaded_text(tmp_path, MODELS_ALONE + PARTS[part])
    assert f"names {part}, but not {', '.join(rest)}. Name the rest, too, or none of them" in str(refused.value)
    with pytest.raises(ConfigError, match=rf", but not {part}\. Name the rest"):
        loaded_text(tmp_path, MODELS_ALONE + "".join(PARTS[key] for key in rest))


def test_a_rule_that_scores_brings_its_lessons_and_is_not_a_part(tmp_path, caplog):
    text = MODELS_ALONE + (
        "  teacher_prompt_path: prompt_templates/teacher_language_prompt.txt\n"
        "  student_personas_prompts_paths: {simple_student: prompt_templates/personas/simple_student.txt}\n"
        "  judges_rules_prompts_paths: {pedagogical_eval: prompt_templates/judges/language_tutor_eval.txt}\n"
    )
    with caplog.at_level(logging.WARNING):
        config = loaded_text(tmp_path, text)
    assert [source.name_or_path for source in config.dataset.train_datasets] == ["data/lesson_plans/train.jsonl"]
    assert "maths classroom" not in caplog.text
