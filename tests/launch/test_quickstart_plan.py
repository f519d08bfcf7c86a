"""The quickstart's commands: which override goes to which program, and what they are on a machine with GPUs."""

import shlex
from types import SimpleNamespace

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.errors import ConfigError
from classroom_rl.launch.quickstart import main, make_models
from classroom_rl.launch.quickstart_plan import applies, make_commands
from classroom_rl.memory.budget import Launch
from classroom_rl.memory.report import report
from classroom_rl.rollout.environment import models_on_engines
from classroom_rl.system.processes import Signals
from classroom_rl.trainer.fine_tuning import refuse_hidden_data_parallelism
from tests.support.configs import loaded, training


def test_overrides_reach_the_programs_that_they_are_meant_for(tmp_path):
    quickstart = make_commands(
        [
            f"logging.save_dir='{tmp_path / 'a run'}'",
            "seed=2",
            "train.learning_rate=0",
            "generation.max_turns=5",
            "generation.server_port=8123",
            "num_samples_per_problem=1",
            "sft.train.max_steps=7",
        ]
    )
    rl = training(*quickstart.rl_arguments)
    sft = loaded("train_sft", *quickstart.models.sft_arguments())
    evaluation = loaded("eval", *quickstart.eval_arguments("after"))

    folder = str(tmp_path / "a run")
    assert (rl.seed, rl.train.learning_rate, rl.generation.max_turns, rl.logging.save_dir) == (2, 0, 5, folder)
    assert rl.teacher_model.model_name_or_path == rl.student_model.model_name_or_path == str(quickstart.models.model)
    assert rl.dataset.train_datasets[0].name_or_path == f"{folder}/world/lessons_train.jsonl"

    assert (sft.seed, sft.train.max_steps, sft.logging.save_dir) == (2, 7, f"{folder}/sft")
    assert sft.train.learning_rate > 0

    assert (evaluation.seed, evaluation.num_samples_per_problem) == (2, 1)
    assert evaluation.server_url == "http://127.0.0.1:8123"
    assert evaluation.logging.save_dir == f"{folder}/eval/after"
    assert evaluation.dataset.eval_datasets[0].name_or_path == f"{folder}/world/lessons_heldout.jsonl"
    assert quickstart.models.world_command()[-4:] == ["--out", f"{folder}/world", "--seed", "2"]


@pytest.mark.parametrize(
    ("mistake", "nearest"),
    [("train.learning_rat=1", "train.learning_rate"), ("sft.train.max_step=1", "train.max_steps")],
)
def test_a_key_that_no_program_has_is_refused_with_the_nearest(mistake, nearest):
    with pytest.raises(ConfigError, match=nearest):
        make_commands([mistake])


def test_keys_inside_mappings_belong_to_the_schema_of_the_mapping():
    assert applies("generation.judges_rules_prompts_paths.mine=x.txt", TrainRLConfig)
    assert applies("+train.reward_weights.end_rm=1", TrainRLConfig)
    assert not applies("train.learning_rate=1", EvalConfig)
    assert not applies("generation=1", EvalConfig)


# With GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8])
def test_the_quickstart_takes_one_gpu_in_float32_with_engines_that_leave_room(count, gpus, tmp_path, capsys):
    gpus(count, mebibytes=8192)
    overrides = [f"logging.save_dir={tmp_path / 'run'}"]
    assert main([*overrides, "dry_run=true"]) == 0
    trainer = next(
        shlex.split(line) for line in capsys.readouterr().out.splitlines() if " classroom_rl.launch.train" in line
    )
    flags = trainer[trainer.index("classroom_rl.launch.accelerate_launch") + 1 : trainer.index("--module")]
    assert flags == ["--config_file", "config/deepspeed/1GPU.yaml", "--mixed_precision", "no"]

    commands = make_commands(overrides)
    assert (commands.config.train.dtype, commands.config.train.optimizer) == ("float32", "adamw_torch")
    engines = models_on_engines(commands.config, reward_weights(commands.config))
    assert {model.vllm.dtype for model in engines.values()} == {"float32"}
    memory_report = report(commands.config, lambda: Launch(1, zero_stage=2))
    assert "memory on a GPU of 8.00 GiB" in memory_report.lines[0] and memory_report.refusals == []


def test_the_fine_tuning_of_the_quickstart_sees_one_of_several_gpus(gpus, tmp_path, monkeypatch):
    gpus(8)
    commands, state = make_commands([f"logging.save_dir={tmp_path / 'run'}"]), SimpleNamespace(num_processes=1)
    with pytest.raises(ConfigError, match="8 GPUs are visible to one process"):
        refuse_hidden_data_parallelism(state, "train_sft")
    environments = {}

    class Program:
        def __init__(self, name, command, signals, log, echo, environment):
            environments[name] = environment or {}

        __enter__, __exit__, wait = lambda self: self, lambda *_: None, lambda *_: 0

    monkeypatch.setattr("classroom_rl.launch.quickstart.Child", Program)
    for visible, expected in ((None, "0"), ("3,5", "3"), ("GPU-7f", "GPU-7f")):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        make_models(commands.models, SimpleNamespace(stage=lambda *_: Signals()), Signals())
        assert environments["train_sft.py"] == {"CUDA_VISIBLE_DEVICES": expected}
        with monkeypatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", expected)
            refuse_hidden_data_parallelism(state, "train_sft")
