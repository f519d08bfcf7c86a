"""What a training reports: the trackers' settings, the metrics file, the lines that a user reads."""

import json
import os
from types import SimpleNamespace

import pytest

from classroom_rl.config.base import LoggingConfig
from classroom_rl.errors import ClassroomError, ConfigError
from classroom_rl.results.trackers import report_to
from classroom_rl.trainer import sample_batch
from classroom_rl.trainer.callbacks import MetricsCallback
from tests.support.offline_trainer import offline_trainer, save_tiny_model


@pytest.fixture
def clean_environment(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "TENSORBOARD_")):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def test_without_trackers_nothing_is_reported(tmp_path, clean_environment):
    assert report_to(LoggingConfig(), tmp_path) == ["none"]


def test_trackers_come_once_and_find_their_settings(tmp_path, clean_environment):
    logging = LoggingConfig(
        wandb=True,
        report_to=["tensorboard", "wandb"],
        wandb_project="tutors",
        wandb_entity="lab",
        run_group="7b",
        wandb_tags=["a", "b"],
    )
    assert report_to(logging, tmp_path) == ["tensorboard", "wandb"]
    variables = {name: value for name, value in os.environ.items() if name.startswith(("WANDB_", "TENSORBOARD_"))}
    assert variables == {
        "WANDB_PROJECT": "tutors",
        "WANDB_ENTITY": "lab",
        "WANDB_RUN_GROUP": "7b",
        "WANDB_TAGS": "a,b",
        "WANDB_DIR": str(tmp_path),
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard"),
    }


def test_a_tracker_that_is_not_installed_is_told_before_anything_is_loaded(tmp_path, clean_environment):
    with pytest.raises(ConfigError, match="logging asks for clearml, which is not installed .* pip install clearml"):
        report_to(LoggingConfig(report_to=["tensorboard", "clearml"]), tmp_path)


def test_the_environments_own_metrics_are_of_the_conversations_of_all_processes(world, tmp_path, monkeypatch):
    """The correlation of a few conversations of each process is not that of all of them."""
    indices = []
    trainer = offline_trainer(tmp_path, save_tiny_model(tmp_path / "model", world / "blank"))
    trainer.player._metrics = lambda records: indices.append([record.index for record in records]) or {}
    monkeypatch.setattr(sample_batch, "to_main_process", lambda processes, own: [own, own])
    trainer.batch()
    assert indices == [[*range(8), *range(8)]]


def test_a_process_that_is_not_the_main_one_leaves_metrics_of_all_to_it(world, tmp_path, monkeypatch):
    """It has not got the others' conversations, and their mean over processes counts those that have recorded one."""
    calls = []
    trainer = offline_trainer(tmp_path, save_tiny_model(tmp_path / "model", world / "blank"))
    trainer.player._metrics = lambda records: calls.append(records) or {}
    monkeypatch.setattr(sample_batch, "to_main_process", lambda processes, own: None)
    trainer.batch()
    logged = trainer._figures
    assert not calls and "rewards/pedagogical/mean" not in logged and "judge/failed_share" in logged


def state_at(step: int, of: int = 4) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=of, is_world_process_zero=True)


def lines_of(run_folder) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_recorded_and_shown_with_what_is_left(tmp_path, capsys):
    callback = MetricsCallback(tmp_path)
    callback.on_train_begin(None, state_at(0), None)
    for step in range(1, 5):
        callback.on_log(None, state_at(step), None, {"loss": 1 / step, "learning_rate": 0.1})
    callback.on_log(None, state_at(4), None, {"train_runtime": 3.0})
    assert [(line["step"], line["loss"], line["learning_rate"]) for line in lines_of(tmp_path)] == [
        (step, 1 / step, 0.1) for step in range(1, 5)
    ]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in printed] == [
        ["step 1/4", "loss 1"],
        ["step 2/4", "loss 0.5"],
        ["step 3/4", "loss 0.3333"],
        ["step 4/4", "loss 0.25"],
    ]
    assert printed[-1].endswith("ETA 0:00")


def test_plain_lines_keep_their_distance_but_the_last_step_is_shown(tmp_path, capsys):
    callback = MetricsCallback(tmp_path, every_s=1e9)
    callback._shown = 1e18  # the last line was just now
    callback.on_train_begin(None, state_at(0), None)
    for step in range(1, 5):
        callback.on_log(None, state_at(step), None, {"loss": 1.0})
    assert capsys.readouterr().out.startswith("step 4/4")
    assert len(lines_of(tmp_path)) == 4


def test_a_resumed_run_replaces_the_steps_it_makes_again_and_a_line_that_a_kill_cut_off(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9}\n{"step": 2, "loss": 9}\n{"step": 3, "lo')
    callback = MetricsCallback(tmp_path)
    callback.on_train_begin(None, state_at(1), None)
    callback.on_log(None, state_at(2), None, {"loss": 1.0})
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 9), (2, 1.0)]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_training(tmp_path, loss):
    callback = MetricsCallback(tmp_path)
    callback.on_train_begin(None, state_at(0), None)
    with pytest.raises(ClassroomError, match=f"The loss is {loss} at step 1: the training has diverged. Lower train"):
        callback.on_log(None, state_at(1), None, {"loss": loss})
    assert not (tmp_path / "metrics.jsonl").exists()
