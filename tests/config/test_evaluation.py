"""The shipped evaluations: each loads, completes a dry run, and changes only the tutor of the shared classroom."""

from dataclasses import replace

import pytest
import yaml

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import ROOT, to_yaml
from classroom_rl.config.values import EMBEDDED_JUDGES
from classroom_rl.environments.classroom.prompt_check import check_prompts
from classroom_rl.evaluation.published.run import check_benchmark_prompts
from tests.support.configs import loaded, own_file
from tests.support.programs import run_program

TUTORS = {
    "Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen2.5-14B-Instruct": "Qwen/Qwen2.5-14B-Instruct",
    "TutorRL": "eth-nlped/TutorRL-7B",
    "TutorRL-think": "eth-nlped/TutorRL-7B-think",
    "SocraticLM": "CogBase-USTC/SocraticLM",
    "GPT-4o": "openai/gpt-4o-2024-11-20",
    "DeepSeek-V3": "deepseek/deepseek-chat-v3-0324",
    "Gemini": "gemini-3.8-flash",
}
FILES = sorted(path.stem for path in (ROOT / "config/eval").glob("*.yaml"))


def evaluation(name: str) -> EvalConfig:
    return loaded("eval", "--config-name", name)


@pytest.mark.parametrize("name", TUTORS)
def test_a_tutor_meets_the_same_student_judge_and_problems_as_the_others(name: str):
    config, base = evaluation(name), evaluation("maths")
    assert config.teacher_model.model_name_or_path == TUTORS[name]
    assert config.logging.save_dir != base.logging.save_dir
    generation = replace(
        config.generation,
        use_thinking=base.generation.use_thinking,
        force_thinking=base.generation.force_thinking,
        teacher_prompt_path=base.generation.teacher_prompt_path,
        forced_conversation_type=base.generation.forced_conversation_type,
    )
    assert replace(config, teacher_model=base.teacher_model, logging=base.logging, generation=generation) == base
    assert config.teacher_model.vllm.temperature == base.teacher_model.vllm.temperature == 0.6


@pytest.mark.parametrize("name", FILES)
def test_its_prompts_can_be_filled_in(name: str):
    config = evaluation(name)
    embedded = config.judge_model.model_name_or_path in EMBEDDED_JUDGES
    check_prompts(config.generation, judge_reads_templates=not embedded)
    if config.benchmark is not None:
        check_benchmark_prompts(config)
        assert config.benchmark.name == name


KNOWN = """
teacher_model:
  model_name_or_path: some/tutor
  use_openrouter: false
  vllm: {temperature: 0.6, max_length: 12000, max_num_seqs: 512, gpu_memory_utilization: 0.85, enforce_eager: true,
         number_of_gpus_per_instance: 1, max_number_of_instances: -1, load_and_unload: true, use_v0: true, from_0: true}
student_model:
  model_name_or_path: neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8
  vllm: {temperature: 0.6}
judge_model:
  model_name_or_path: google/gemma-3-27b-it
reward_model:
  model_name_or_path: "Answer"
generation:
  use_thinking: true
  force_thinking: true
num_samples_per_problem: 2
score_using_pedagogical_reward: true
recompute_initial_attempts: true
logging: {wandb: true, wandb_project: eval, wandb_run_name: mine, run_group: tutor, wandb_tags: [tutor, 7b]}
"""


def test_an_evaluation_that_names_models_alone_is_one_of_a_maths_tutor(tmp_path):
    """So are those that users bring along."""
    config = loaded("eval", *own_file(tmp_path, KNOWN))
    base = evaluation("maths")
    assert config.generation == replace(base.generation, use_thinking=True, force_thinking=True)
    assert config.dataset == base.dataset and config.num_samples_per_problem == 2
    more = KNOWN.replace("  use_thinking", "  student_final_prompt_path: mine.txt\n  use_thinking")
    extended = loaded("eval", *own_file(tmp_path, more))
    assert extended.generation == replace(config.generation, student_final_prompt_path="mine.txt")


def test_who_thinks_and_who_is_elsewhere():
    configs = {name: evaluation(name) for name in TUTORS}
    assert [name for name in TUTORS if configs[name].generation.force_thinking] == ["TutorRL-think"]
    assert [name for name in TUTORS if configs[name].teacher_model.is_remote] == ["GPT-4o", "DeepSeek-V3", "Gemini"]
    assert configs["Gemini"].teacher_model.use_gemini and configs["GPT-4o"].teacher_model.use_openrouter


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_each_runs_dry(name: str):
    result = run_program("eval.py", "--config-name", f"{name}.yaml", "dry_run=true")
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout) == yaml.safe_load(to_yaml(replace(evaluation(name), dry_run=True)))
