"""The length of a run and how far it can move a weight: compared with values worked out by hand, and with torch, TRL,
transformers and PEFT."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from transformers import get_scheduler
from trl.trainer.utils import RepeatSampler

import classroom_rl.server.app
import classroom_rl.trainer.session
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.models import LoraConfig
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.config.values import OPTIMIZERS, SCHEDULERS
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.launch import server, train
from classroom_rl.launch.cli import main as launcher
from classroom_rl.trainer.run_length import (
    TYPICAL_WIDTH,
    RunLength,
    farthest_move,
    report_length,
    report_length_before_training,
    run_length,
)

TUTOR = TrainConfig(number_of_problems_per_batch=16, num_samples_per_problem=8, learning_rate=5e-7, mu=2)
SAYS_40 = "training: 330 problems, 20 batches of 16 × 8 = 128 conversations, 2560 in all; 40 optimizer steps"


def shipped(name: str, *overrides: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", ["--config-name", name, *overrides], check_train_rl)


# How long -----------------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """330 / 16 = 20.6: 20 batches of 128 conversations, each in two steps."""
    assert run_length(TUTOR, 330) == RunLength(20, 2560, 40)
    assert run_length(replace(TUTOR, epochs=3), 330) == RunLength(60, 7680, 120)
    assert run_length(replace(TUTOR, max_steps=7, epochs=3), 330) == RunLength(4, 512, 7), "the last batch is cut short"
    assert run_length(replace(TUTOR, max_steps=7), None) == RunLength(4, 512, 7)
    assert run_length(TUTOR, None) is None


@given(st.integers(1, 200), st.integers(1, 9), st.integers(2, 5), st.integers(1, 3), st.integers(1, 3))
def test_an_epoch_has_as_many_steps_as_trl_makes_of_it(problems, per_batch, group, mu, epochs) -> None:
    """As TRL and transformers count: rows of the sampler, micro-batches of the loader, steps."""
    micro_batches = group  # of per_batch conversations each
    sampler = RepeatSampler(range(problems), group, per_batch, mu * micro_batches, shuffle=False)
    loaded = len(sampler) // (per_batch * micro_batches)
    steps = loaded // micro_batches * epochs
    train = TrainConfig(
        number_of_problems_per_batch=per_batch,
        num_samples_per_problem=group,
        per_device_train_batch_size=per_batch,
        mu=mu,
        epochs=epochs,
    )
    assert run_length(train, problems).steps == steps


# How far ------------------------------------------------------------------------------------------------------------


def test_40_steps_at_5e_7_do_not_move_a_typical_weight_in_bfloat16() -> None:
    assert farthest_move(TUTOR, None, 40) == pytest.approx(2e-5)
    weight = torch.nn.Parameter(torch.tensor([0.02]))
    optimizer = torch.optim.AdamW([weight], lr=5e-7, weight_decay=0.0)
    for _ in range(40):
        weight.grad = torch.ones(1)
        optimizer.step()
    assert weight.item() == pytest.approx(0.02 - 2e-5, rel=1e-5)
    assert weight.detach().bfloat16() == torch.tensor([0.02]).bfloat16()
    assert (weight.detach() - 157 * 5e-7).bfloat16() < torch.tensor([0.02]).bfloat16(), "157 steps do"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_that_falls_goes_half_as_far(name: str) -> None:
    steps = 200
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=steps)
    gone = 0.0
    for _ in range(steps):
        gone += optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
    train = replace(TUTOR, learning_rate=1e-3, lr_scheduler_type=name)
    assert farthest_move(train, None, steps) == pytest.approx(gone, rel=0.02)


def test_an_adapter_moves_what_it_is_added_to_as_peft_scales_it() -> None:
    """32 / √(3 × 16 × 4096) = 32 / 443.4 = 0.0722 of the way that its B goes."""
    move = farthest_move(replace(TUTOR, learning_rate=1e-4), LoraConfig(enable=True), 10)
    assert move == pytest.approx(1e-3 * 0.0722, rel=1e-3)
    torch.manual_seed(0)
    options = PeftLora(r=16, lora_alpha=32, target_modules=["0"], lora_dropout=0.0)
    layer = get_peft_model(torch.nn.Sequential(torch.nn.Linear(TYPICAL_WIDTH, 64)), options).base_model.model[0]
    signs = torch.randint(0, 2, layer.lora_B.default.weight.shape) * 2.0 - 1
    layer.lora_B.default.weight.data = 1e-3 * signs  # ten steps of 1e-4, each weight its own way
    moved = layer.get_delta_weight("default").detach().square().mean().sqrt().item()
    assert moved == pytest.approx(move, rel=0.03)


def test_only_optimizers_with_bounded_steps_are_reckoned() -> None:
    assert [name for name in OPTIMIZERS if farthest_move(replace(TUTOR, optimizer=name), None, 1) is None] == ["sgd"]


# What is said -------------------------------------------------------------------------------------------------------


def test_the_tutor_as_shipped_is_warned_about_and_the_recipe_is_not() -> None:
    tutor = report_length_before_training(shipped("language_tutor"))
    assert tutor.lines[0].startswith(SAYS_40) and "0.1 % of a typical one" in tutor.lines[1]
    assert "40 optimizer steps at train.learning_rate 5e-07 move a weight by less" in tutor.warning
    assert "It takes 157 steps (train.epochs, train.max_steps) or a train.learning_rate of 2e-06" in tutor.warning
    recipe = report_length_before_training(shipped("language_tutor_recipe"))
    assert "10240 in all; 160 optimizer steps" in recipe.lines[0] and recipe.warning is None


@pytest.mark.parametrize("name", ["7b", "maths_small", "quickstart"])
def test_other_shipped_configurations_are_not_warned_about(name: str) -> None:
    assert report_length(shipped(name), 10_000).warning is None


def test_the_warning_is_about_the_engines_precision_and_no_learning_rate_at_all() -> None:
    for dtype, warned in (("auto", True), ("bfloat16", True), ("float16", False), ("float32", False)):
        config = shipped("language_tutor", f"teacher_model.vllm.dtype={dtype}")
        assert (report_length(config, 330).warning is not None) is warned
    zero_rate = report_length(shipped("quickstart", "train.learning_rate=0"), None)
    assert zero_rate.warning == "Nothing will be learned: train.learning_rate is 0."
    slow = report_length(shipped("language_tutor_recipe", "train.learning_rate=5e-7"), 330)
    assert "It takes 2166 steps" in slow.warning  # 0.02 / 256 / (5e-7 × 0.07217) = 2165.1


def test_what_the_warning_asks_for_is_enough() -> None:
    for change in ("train.max_steps=157", "train.learning_rate=2e-6"):
        assert report_length(shipped("language_tutor", change), 330).warning is None
    assert report_length(shipped("language_tutor", "train.max_steps=156"), 330).warning is not None


def test_problems_on_the_hub_are_not_fetched_to_be_counted() -> None:
    report = report_length_before_training(shipped("7b"))
    assert report.warning is None and "is known when rd211/Big-Math-RL-Verified-Filtered is loaded" in report.lines[0]
    assert "every 16 of them are a batch of 16 × 8 = 128 conversations and 2 optimizer steps" in report.lines[0]
    limited = report_length_before_training(shipped("7b", "train.max_steps=10"))
    assert limited.lines[0].startswith("training: 5 batches") and "10 optimizer steps" in limited.lines[0]


@pytest.fixture
def weak(tmp_path: Path) -> list[str]:
    """Overrides of the quickstart that make 2 steps of it, in bfloat16; its models are not there."""
    lessons = tmp_path / "lessons.jsonl"
    lessons.write_text('{"problem": "a lesson", "answer": ""}\n' * 20, encoding="utf-8")
    return [
        f"logging.save_dir={tmp_path / 'run'}",
        f"dataset.train_datasets=[{{name_or_path: {lessons}}}]",
        *("train.max_steps=-1", "train.learning_rate=1e-6", "teacher_model.vllm.dtype=bfloat16"),
    ]


SAYS_2 = "training: 20 problems, 2 batches of 8 × 8 = 64 conversations, 128 in all; 2 optimizer steps"
WARNS = "This run can hardly teach anything: 2 optimizer steps at train.learning_rate 1e-06"


def test_dry_runs_say_it_as_comments(weak: list[str], capsys: pytest.CaptureFixture) -> None:
    config = shipped("quickstart", *weak)
    for show in (train.more_of_dry_run, server.more_of_dry_run):
        show(config)
    assert launcher(["--config-name", "quickstart", *weak, "dry_run=true"]) == 0
    output = capsys.readouterr().out
    assert output.count(f"# {SAYS_2}") == output.count(f"# warning: {WARNS}") == 3


def test_a_trainer_says_it_as_it_starts(weak: list[str], monkeypatch, caplog) -> None:
    def stop(*_: object) -> None:
        raise ConfigError("far enough")

    monkeypatch.setattr(classroom_rl.trainer.session, "assign_server", stop)
    config = shipped("quickstart", *weak)
    folder = Path(config.logging.save_dir)
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match="far enough"):
        classroom_rl.trainer.session._open(config, folder, PartialState(cpu=True))
    assert_told(caplog)


def test_a_server_says_it_as_it_starts(weak: list[str], monkeypatch, caplog) -> None:
    monkeypatch.setattr(classroom_rl.server.app, "serve", lambda config: None)
    with caplog.at_level(logging.INFO):
        server._serve.__wrapped__(shipped("quickstart", *weak))
    assert_told(caplog)
    caplog.clear()
    server._serve.__wrapped__(shipped("quickstart", *weak, "train.number_of_problems_per_batch=50"))
    assert "a training would be refused: 20 problems are left to train on" in caplog.text


def assert_told(caplog: pytest.LogCaptureFixture) -> None:
    messages = {
        record.levelno: record.getMessage()
        for record in caplog.records
        if record.name == "classroom_rl.trainer.run_length"
    }
    assert messages[logging.INFO].startswith(SAYS_2) and messages[logging.WARNING].startswith(WARNS)


def test_a_template_of_problems_that_fails_is_found_by_a_dry_run(weak: list[str], tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("Lesson:\n{{ problem + 1 }}", encoding="utf-8")
    source = f"{{name_or_path: {tmp_path / 'lessons.jsonl'}, problem_template: {tmp_path / 'plan.txt'}}}"
    config = shipped("quickstart", *weak, f"dataset.train_datasets=[{source}]")
    with pytest.raises(DataError, match=r"lessons\.jsonl: row 1: .*plan\.txt, line 2 cannot be filled in: TypeError"):
        report_length_before_training(config)


def test_the_recipe_changes_nothing_but_what_it_says() -> None:
    text = (ROOT / "config/train_rl/language_tutor_recipe.yaml").read_text(encoding="utf-8")
    tutor, recipe = shipped("language_tutor"), shipped("language_tutor_recipe")
    assert recipe.teacher_model.adapter is not None and recipe.guards.judge_check_every_n_steps == 20
    assert (tutor.generation, tutor.student_model, tutor.judge_model, tutor.dataset) == (
        recipe.generation,
        recipe.student_model,
        recipe.judge_model,
        recipe.dataset,
    )
    length = run_length(recipe.train, 330)
    assert f"{length.steps} steps and {length.conversations:,} conversations" in text
    assert f"{2 * length.conversations:,} judge requests" in text
