"""The language tutor's configuration as users know it, and the values that follow from it."""

import logging
from pathlib import Path

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.environments.classroom.config import classroom_rules, setup_options
from classroom_rl.environments.classroom.setup import ConversationType, persona_weights
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.trainer.run_length import load_training_problems
from tests.support.configs import loaded, loaded_text

BLOCK = """\
train: {number_of_problems_per_batch: 16, num_samples_per_problem: 8, learning_rate: 5e-7, beta: 0.001, mu: 2}
teacher_model:
  model_name_or_path: "unsloth/Qwen3-4B-Instruct-2507"
  vllm: {temperature: 1.0, max_length: 6144, gpu_memory_utilization: 0.4}
student_model:
  model_name_or_path: "unsloth/Qwen3-4B-Instruct-2507"
  vllm: {temperature: 0.6, max_length: 6144, gpu_memory_utilization: 0.4}
judge_model:
  model_name_or_path: "google/gemini-2.5-flash-preview-09-2025"
  use_openrouter: true
  vllm: {temperature: 0.6}
reward_model: {model_name_or_path: "Answer"}
logging: {wandb: true, wandb_project: "language-tutor-rl", wandb_run_name: "Qwen3-4B-GRPO-Run-1", save_dir: checkpoints/language_tutor}
generation:
  teacher_prompt_path: "prompt_templates/teacher_language_prompt.txt"
  student_personas_prompts_paths:
    correct_student: "prompt_templates/personas/language_student_correct.txt"
    error_student: "prompt_templates/personas/language_student_error.txt"
  judges_rules_prompts_paths: {pedagogical_eval: "prompt_templates/judges/language_tutor_eval.txt"}
  extra_penalty_for_rejected_judges: 0.25
  ignore_rejected_judge: true
  use_experimental_shared_memory: false
"""  # noqa: E501


def test_the_block_that_users_know_loads_as_it_stands_and_says_what_has_no_effect(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        config = loaded_text(tmp_path, BLOCK)
    assert [record.args[0] for record in caplog.records] == ["generation.use_experimental_shared_memory"]
    assert (config.train.mu, config.train.learning_rate, config.judge_model.use_openrouter) == (2, 5e-7, True)
    assert reward_weights(config) == {"pedagogical": 1.0}
    assert setup_options(config.generation).types == (ConversationType.GUIDED,)
    assert classroom_rules(config.generation, reward_weights(config), 6144, graded=True).solutions == 0
    assert [source.name_or_path for source in config.dataset.train_datasets] == ["data/lesson_plans/train.jsonl"]


def test_the_shipped_file_is_that_block_with_its_dataset(tmp_path: Path) -> None:
    shipped = loaded("train_rl", "--config-name", "language_tutor.yaml")
    assert shipped == loaded_text(tmp_path, BLOCK)


def test_plans_are_the_problems_that_follow_from_a_rule_that_scores(tmp_path: Path) -> None:
    config = loaded_text(tmp_path, BLOCK, "skip_first_samples=3", "dataset.max_train_examples=20")
    problems = load_training_problems(config)
    assert len(problems) == 17 and all("Chunks" in problem.text for problem in problems)
    all_problems = load_training_problems(loaded_text(tmp_path, BLOCK, "dataset.max_train_examples=20"))
    assert problems == all_problems[3:]
    with pytest.raises(ConfigError, match="15 problems are left"):
        load_training_problems(loaded_text(tmp_path, BLOCK, "dataset.max_train_examples=15"))
    held_out = EvalConfig(generation=config.generation).dataset.eval_datasets
    train_plans = load_problems(config.dataset.train_datasets)
    assert not {plan.id for plan in load_problems(held_out)} & {plan.id for plan in train_plans}


def test_an_ok_or_reject_rule_brings_no_plans_and_no_guided_type() -> None:
    with pytest.raises(DataError, match="No dataset is configured"):
        load_training_problems(TrainRLConfig())
    assert TrainRLConfig().generation.forced_conversation_type is None


@pytest.mark.parametrize("value", ["GUIDED", "Guided", "guided"])
def test_types_are_taken_in_any_case(tmp_path: Path, value: str) -> None:
    config = loaded_text(tmp_path, BLOCK, f"generation.forced_conversation_type={value}")
    assert setup_options(config.generation).types == (ConversationType.GUIDED,)


@pytest.mark.parametrize(
    "override",
    [
        "generation.number_student_attempts=0",
        "reward_model.model_name_or_path=None",
        "teacher_model.vllm.max_num_seqs=64",
        "student_model.vllm.number_of_gpus_per_instance=2",
        "teacher_model.vllm.enforce_eager=true",
        "huggingface={name: me/tutor, push_to_hub: true}",
    ],
)
def test_keys_with_a_meaning_load(tmp_path: Path, override: str) -> None:
    loaded_text(tmp_path, BLOCK, override)


def test_a_single_persona_draws_no_errors(tmp_path: Path) -> None:
    before, after = BLOCK.split("    correct_student:")[0], BLOCK.split('language_student_error.txt"\n')[1]
    block = before + '    simple_student: "prompt_templates/personas/simple_student.txt"\n' + after
    config = loaded_text(tmp_path, block)
    assert setup_options(config.generation).persona_weights == {"simple_student": 1.0}


def test_error_rates_by_persona(tmp_path: Path) -> None:
    config = loaded_text(tmp_path, BLOCK, "generation.student_error_rate={correct_student: 3, error_student: 1}")
    assert setup_options(config.generation).persona_weights == {"correct_student": 0.75, "error_student": 0.25}
    assert persona_weights(["a", "b", "c"], {"a": 1, "b": 1, "c": 2}) == {"a": 0.25, "b": 0.25, "c": 0.5}
