"""A training that resumes with a changed configuration: allowed changes take effect, others are refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from config.base import GenerationConfig
from config.checks import check_train_rl
from config.load import load, to_yaml
from config.train_rl_model import TrainRLConfig
from src.errors import ConfigError
from src.grpo.run import train
from src.grpo.trainer import ClassroomGRPOTrainer
from src.launch.cli import main as launch
from src.server.auth import TOKEN_VARIABLE
from src.sft.run import _Trainer as SFTTrainer
from src.training.checkpoints import UNFINISHED
from src.training.correction_set import CURSOR_NAME, CorrectionSet
from src.training.resume import FIXED, MADE_WITH, TAKES_EFFECT, check_launch, check_resume, keys_of, write_config
from src.training.trainer_hooks import ResumedTrainer
from tests.conftest import free_port
from tests.support.scripted_room import Room, application, serving


def configured(run_folder: Path, *overrides: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", [f"logging.save_dir={run_folder}", *overrides], check_train_rl)


def checkpoint_made_with(run_folder: Path, *overrides: str, step: int = 20) -> Path:
    folder = run_folder / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    write_config(folder, configured(run_folder, *overrides))
    return folder


def test_every_key_of_the_training_and_its_data_is_decided_on() -> None:
    keys = set(keys_of(TrainRLConfig))
    decided = {key for key in keys if key.startswith(("train.", "dataset.", "teacher_model.lora.")) or "." not in key}
    assert decided - {"dry_run"} == (set(FIXED) | TAKES_EFFECT) - {"teacher_model.model_name_or_path"}
    assert set(FIXED) | TAKES_EFFECT <= keys and not set(FIXED) & TAKES_EFFECT


LAUNCHES = {
    "optimizer.pt": {},
    "latest": {"ACCELERATE_USE_DEEPSPEED": "true"},
    "optimizer.bin": {"ACCELERATE_USE_FSDP": "true"},
}


@pytest.mark.parametrize("state", LAUNCHES)
def test_a_training_launched_otherwise_does_not_begin_with_a_new_optimizer(state: str, tmp_path: Path) -> None:
    (tmp_path / state).touch()
    for found, environment in LAUNCHES.items():
        if found == state:
            check_launch(tmp_path, {"ACCELERATE_USE_DEEPSPEED": "false", **environment})
        else:
            with pytest.raises(ConfigError, match="a new state of the optimizer. Give accelerate the --config_file"):
                check_launch(tmp_path, environment)


OTHERS = {
    "environment": "src.classroom",
    "seed": "7",
    "skip_first_samples": "3",
    "dataset.train_datasets": "[{name_or_path: other.jsonl}]",
    "dataset.max_train_examples": "100",
    "train.number_of_problems_per_batch": "16",
    "train.num_samples_per_problem": "4",
    "train.mu": "2",
    "train.algorithm": "ppo",
    "train.optimizer": "sgd",
    "train.dtype": "bfloat16",
    "teacher_model.model_name_or_path": "Qwen/Qwen3-0.6B",
    "teacher_model.lora.enable": "true",
    "teacher_model.lora.rank": "8",
    "teacher_model.lora.alpha": "8",
    "teacher_model.lora.target_modules": "[q_proj]",
    "teacher_model.lora.dropout": "0.1",
    "teacher_model.lora.bias": "lora_only",
}


@pytest.mark.parametrize("key", sorted(FIXED))
def test_what_a_checkpoint_depends_on_may_not_change(tmp_path: Path, key: str) -> None:
    checkpoint_made_with(tmp_path, step=5)
    last = checkpoint_made_with(tmp_path)
    with pytest.raises(ConfigError) as refused:
        if key == "environment":  # another environment has other keys, so it is set after loading
            config = replace(configured(tmp_path), environment="tests.support.guessing")
        else:
            config = load(TrainRLConfig, "train_rl", [f"logging.save_dir={tmp_path}", f"{key}={OTHERS[key]}"])
        check_resume(tmp_path, config)
    message = str(refused.value)
    assert message.startswith(f"The training cannot go on from {last}: {key} was ") and FIXED[key] in message
    assert message.endswith("Set back what has changed, or give a new run another folder, logging.save_dir=…")


def test_what_takes_effect_is_told_with_both_values(tmp_path: Path) -> None:
    assert check_resume(tmp_path, configured(tmp_path)) == []
    checkpoint_made_with(tmp_path)
    assert check_resume(tmp_path, configured(tmp_path)) == []
    rate = configured(tmp_path).train.learning_rate
    overrides = ("train.learning_rate=1e-3", "train.beta=0.01", "train.loss_type=grpo", "generation.max_turns=3")
    assert check_resume(tmp_path, configured(tmp_path, *overrides)) == [
        f"train.learning_rate changes from {rate} to 0.001 after step 20",
        "train.beta changes from 0.0 to 0.01 after step 20",
        'train.loss_type changes from "dapo" to "grpo" after step 20',
        "generation.max_turns changes from 9 to 3 after step 20",
    ]


def test_supervision_may_begin_change_and_end_with_a_line_for_each_key(tmp_path: Path) -> None:
    supervised = (
        "supervisor_model.model_name_or_path=rubric",
        "generation.supervisor.share=0.5",
        "train.turn_credit.mode=immediate",
        "train.corrections.mode=pass",
    )
    checkpoint_made_with(tmp_path)
    begun = check_resume(tmp_path, configured(tmp_path, *supervised))
    assert [line.partition(" changes from ")[0] for line in begun] == [
        "train.turn_credit.mode",
        "train.corrections.mode",
        "supervisor_model",
        "generation.supervisor.share",
    ]
    assert begun[1] == 'train.corrections.mode changes from "none" to "pass" after step 20'
    checkpoint_made_with(tmp_path, *supervised, step=30)
    other = ("generation.supervisor.on_invalid=replace", "generation.supervisor.penalties.leak=-4")
    changed = ("train.corrections.interval=5", "train.corrections.learning_rate=1e-5", "train.turn_credit.weight=0.1")
    lines = check_resume(tmp_path, configured(tmp_path, *supervised, *other, *changed))
    assert "train.turn_credit.weight changes from 0.3 to 0.1 after step 30" in lines
    assert "train.corrections.learning_rate changes from null to 1e-05 after step 30" in lines
    assert 'generation.supervisor.on_invalid changes from "observe" to "replace" after step 30' in lines
    assert any(line.startswith("generation.supervisor.penalties changes from ") for line in lines)
    assert len(lines) == 5
    ended = check_resume(tmp_path, configured(tmp_path))
    assert any(line.startswith("supervisor_model changes from ") and " to null " in line for line in ended)


def test_a_run_folder_may_be_moved_or_spelt_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_made_with(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert check_resume(tmp_path / "run", configured(Path("run"))) == []
    (tmp_path / "run").rename(tmp_path / "moved")
    assert check_resume(tmp_path / "moved", configured(tmp_path / "moved")) == []


def test_a_checkpoint_that_does_not_say_what_it_was_made_with_is_told_about(tmp_path: Path) -> None:
    (checkpoint_made_with(tmp_path) / MADE_WITH).unlink()
    (told,) = check_resume(tmp_path, configured(tmp_path, "train.mu=2"))
    assert f"checkpoint-20 does not say what it was made with ({MADE_WITH})" in told


def test_the_launcher_refuses_before_any_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoint_made_with(tmp_path)
    assert launch(["--config-name", "quickstart", f"logging.save_dir={tmp_path}", "train.mu=4"]) == 2
    assert "train.mu was 1 and is 4 now (steps are counted in batches of this size)" in capsys.readouterr().err
    assert not (tmp_path / "server.log").exists()


# What takes effect -----------------------------------------------------------------------------------------------


class Tiny(ResumedTrainer, Trainer):
    """The trainer of transformers that TRL's are built on."""


def steps(folder: Path, blank: Path, resume: bool, **changed: object) -> Tiny:
    options = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": 4, "save_steps": 2} | changed
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, use_cpu=True, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="steps", **options,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 16, "labels": [[5, 6, 7, 8]] * 16})
    trainer = Tiny(AutoModelForCausalLM.from_pretrained(blank), arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return trainer


def rates(trainer: Trainer) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_resumed_training_steps_with_the_configured_rate_schedule_and_saving(world: Path, tmp_path: Path) -> None:
    """By hand: the third of 4 steps of a linear decay begins at half of 4e-3, of one over 6 steps at two thirds."""
    blank = world / "blank"
    first = steps(tmp_path, blank, resume=False)
    assert rates(first) == [1e-3] * 4
    assert rates(steps(tmp_path, blank, resume=True))[2:] == [1e-3] * 2
    changed = steps(tmp_path, blank, resume=True, learning_rate=4e-3, lr_scheduler_type="linear", save_steps=3)
    assert rates(changed)[2:] == pytest.approx([2e-3, 1e-3]) and (tmp_path / "checkpoint-3").is_dir()
    longer = steps(tmp_path, blank, resume=True, lr_scheduler_type="linear", max_steps=6, learning_rate=3e-3)
    assert rates(longer)[2:] == pytest.approx([2e-3, 1.5e-3, 1e-3, 0.5e-3])
    one, other = (dict(trainer.model.named_parameters()) for trainer in (first, changed))
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_training_that_has_made_its_steps_makes_no_other(world: Path, tmp_path: Path) -> None:
    """transformers would make one more."""
    blank = world / "blank"
    steps(tmp_path, blank, resume=False, max_steps=2)
    again = steps(tmp_path, blank, resume=True, max_steps=2)
    assert again.state.global_step == 2 and len(rates(again)) == 2
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    assert all(torch.equal(weight, made[name]) for name, weight in again.model.state_dict().items())


def test_a_checkpoint_with_more_steps_than_configured_is_not_gone_on_from(tmp_path: Path) -> None:
    checkpoint = checkpoint_made_with(tmp_path)
    assert check_resume(tmp_path, configured(tmp_path, "train.max_steps=20")) != []
    with pytest.raises(ConfigError, match="checkpoint-20 has made 20 steps already, and train.max_steps is 18"):
        check_resume(tmp_path, configured(tmp_path, "train.max_steps=18"))
    assert checkpoint.is_dir()


def test_both_trainers_go_on_with_the_configured_rate() -> None:
    assert issubclass(ClassroomGRPOTrainer, ResumedTrainer) and issubclass(SFTTrainer, ResumedTrainer)


def test_a_checkpoint_is_complete_with_what_it_was_made_with(tmp_path: Path) -> None:
    config = configured(tmp_path, "train.learning_rate=1e-3")
    (tmp_path / UNFINISHED / "checkpoint-3").mkdir(parents=True)
    trainer = ClassroomGRPOTrainer.__new__(ClassroomGRPOTrainer)
    trainer.run_config, trainer.state = config, SimpleNamespace(global_step=3)
    trainer.corrections = CorrectionSet(tmp_path, 8, "", lambda text: [])
    trainer.corrections.passed(2, 5)
    trainer._complete_checkpoint(tmp_path, keep=2)
    assert (tmp_path / "checkpoint-3" / MADE_WITH).read_text() == to_yaml(config)
    cursor = json.loads((tmp_path / "checkpoint-3" / CURSOR_NAME).read_text())
    assert cursor == {"passes": 1, "examples": 5, "next_step": 2}


def test_the_trainer_refuses_before_it_writes_or_loads_anything(tmp_path: Path) -> None:
    checkpoint_made_with(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint-20: seed was 42 and is 7 now"):
        train(configured(tmp_path, "seed=7"))
    assert not (tmp_path / "config").exists() and not (tmp_path / "run_id").exists()


@pytest.fixture
def port(room: Room, generation: GenerationConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    port = free_port()
    with serving(application(room, generation, monkeypatch)(port=port), port):
        yield port


@pytest.mark.full
def test_a_grpo_run_goes_on_with_another_learning_rate(
    room: Room, generation: GenerationConfig, world: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole run, with scripted engines in the server; then it goes on, as it is configured then."""
    begun = [
        f"teacher_model.model_name_or_path={world / 'blank'}",
        f"dataset.train_datasets=[{{name_or_path: {world / 'lessons_train.jsonl'}}}]",
        "train.number_of_problems_per_batch=1",
        "train.num_samples_per_problem=2",
        "train.per_device_train_batch_size=2",
        "guards.judge_check_every_n_steps=0",
        "logging.save_steps=1",
        "generation.colocate=false",
    ]

    def run(*overrides: str) -> list[float]:
        config = configured(room.folder, *begun, *overrides)
        config.generation = replace(generation, server_port=port, colocate=False)
        train(config)
        lines = (room.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["learning_rate"] for line in lines]

    assert run("train.learning_rate=1e-3", "train.max_steps=1") == [1e-3]
    written = (room.folder / "checkpoints/checkpoint-1" / MADE_WITH).read_text()
    assert "learning_rate: 0.001" in written
    assert run("train.learning_rate=5e-3", "train.max_steps=3") == [1e-3, 5e-3, 5e-3]
    assert "train.learning_rate changes from 0.001 to 0.005 after step 1" in caplog.text
    recorded = (room.folder / "config/train_rl.yaml").read_text()
    with pytest.raises(ConfigError, match=r"checkpoint-3: train.optimizer was \"adamw_torch\" and is \"sgd\" now"):
        run("train.learning_rate=5e-3", "train.max_steps=6", "train.optimizer=sgd")
    assert (room.folder / "config/train_rl.yaml").read_text() == recorded
