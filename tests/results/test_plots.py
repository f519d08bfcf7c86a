"""Tests of the plots of a run: which are drawn, what they show, and how trackers get them; and of rollouts as one
table."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainingArguments
from transformers.integrations import TensorBoardCallback

from classroom_rl.results import panels as ppo_plot
from classroom_rl.results import plots
from classroom_rl.results.plots import write_plots
from classroom_rl.results.run_folder import load_run
from classroom_rl.trainer.callbacks import PlotCallback
from tests.support.synthetic_run import record_of, scored, step_line, write_evaluation, write_training


def line(step: int) -> dict:
    """A metrics line of a training step with everything that can be drawn."""
    checks = {
        "guard/gap": step / 100,
        "guard/held_out_reward": 0.3,
        "guard/canary_praise": 0.1,
        "guard/canary_leak": 0.6,
    }
    return step_line(
        step,
        0.4 + step / 100,
        frac_reward_zero_std=0.25,
        grad_norm=0.1,
        **{"completions/mean_length": 60 - step, "completions/min_length": 20, "completions/max_length": 90},
        **{"conversation/messages": 9.0, "judge/failed_share": 0.01, "conversation/rejected_share": 0.1},
        **{"mismatch/mean_abs_logprob_diff": 1e-6, "mismatch/k3_kl": 0.0},
        **{"supervision/valid_share": 0.5, "supervision/category/leak": 0.5, "corrections/ce_loss": 1.0},
        **{"ppo/explained_variance": -7.0 if step == 1 else step / 100, "ppo/value_loss": 0.1, "ppo/approx_kl": 0.01},
        **{"marooned/ship_progress": step / 100, "marooned/valid_share": 0.5, "marooned/reward_of_colonist": 0.1},
        **(checks if step % 10 == 1 else {}),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_training(folder, [line(step) for step in range(1, 41)], {"environment": "marooned"})
    for when, reward in (("before", 0.4), ("after", 0.8)):
        records = [
            record_of(f"lesson {i % 5}", [], [scored(1, 1, 1)], index=i, reward=reward + i / 100) for i in range(10)
        ]
        write_evaluation(folder / "eval" / when, {"sampled": records, "greedy": records})
    return folder


PLOTS = "reward held_out mismatch lengths judge signal supervision ppo marooned".split()


def drawn(run: Path, panel: plots.Panel) -> dict[str, list[tuple[float, float]]]:
    """The points of each line with a label that a panel draws."""
    axes = Figure().subplots()
    assert panel(axes, load_run(run))
    lines = {curve.get_label(): curve.get_xydata().tolist() for curve in axes.get_lines()}
    return {name: [tuple(point) for point in points] for name, points in lines.items() if not name.startswith("_")}


def test_every_plot_of_a_run_that_holds_everything(run: Path) -> None:
    paths = write_plots(load_run(run))
    assert [path.name for path in paths] == [f"{name}.png" for name in PLOTS]
    assert sorted(path.name for path in (run / "plots").iterdir()) == sorted(path.name for path in paths)
    for path in paths:
        height, width, _ = imread(path).shape
        assert width > 900 and height > 400
        assert (imread(path)[:, :, :3] < 0.9).any(axis=2).mean() > 0.01, f"{path.name} is empty"


def test_the_figures_are_those_of_the_run(run: Path) -> None:
    reward = drawn(run, plots._reward)
    assert reward["held-out judge"] == [(step, 0.3) for step in (1, 11, 21, 31)]
    assert len(reward["training, running mean"]) == 40 and reward["training, running mean"][19][1] == pytest.approx(0.6)
    parts = drawn(run, plots._parts)
    assert parts["overall momentum / 10"][19] == parts["task-final discipline"][19] == (20, pytest.approx(0.6))
    checks = drawn(run, plots._judge_checks)
    assert checks["judge − held-out judge"] == [(step, step / 100) for step in (1, 11, 21, 31)]
    assert set(checks) == {"judge − held-out judge", "canary: praise", "canary: leak"}
    assert set(drawn(run, plots._mismatch)) == {"mean |Δ log-prob|"}, "no logarithm of 0"
    assert drawn(run, plots._judge_failures)["rejected"][0] == (1, pytest.approx(0.1))


def test_the_rewards_of_a_maths_tutor_are_parts(tmp_path: Path) -> None:
    rewards = {"rewards/end_rm/mean": 0.5, "rewards/length/mean": -0.1}
    write_training(tmp_path, [{"step": 1, "reward": 0.4, **rewards}, {"step": 2, "reward": 0.5, **rewards}])
    assert drawn(tmp_path, plots._parts) == {
        "end_rm": [(1, 0.5), (2, 0.5)],
        "length": [(1, pytest.approx(-0.1)), (2, pytest.approx(-0.1))],
    }


def test_what_a_run_does_not_hold_is_not_drawn(tmp_path: Path) -> None:
    write_training(tmp_path, [{"step": 1, "reward": 0.4}, {"step": 2, "reward": float("nan")}])
    assert [path.name for path in write_plots(load_run(tmp_path))] == ["reward.png"]


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    """A run with two plots, which are drawn in a tenth of the time."""
    lines = [{"step": step, "reward": 0.4, "mismatch/mean_abs_logprob_diff": 1e-6} for step in range(1, 41)]
    write_training(tmp_path / "small", lines)
    return tmp_path / "small"


def test_images_reach_tensorboard_with_every_checkpoint(small_run: Path, tmp_path: Path) -> None:
    board = tmp_path / "tensorboard"
    writer = TensorBoardCallback(SummaryWriter(log_dir=str(board)))
    log = PlotCallback(small_run, SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[writer])))
    arguments = TrainingArguments(report_to=["tensorboard"])
    for step in (20, 40):
        log.on_save(arguments, SimpleNamespace(is_world_process_zero=True, global_step=step), None)
    log.on_train_end(arguments, SimpleNamespace(is_world_process_zero=True, global_step=40), None)
    writer.tb_writer.close()
    events = EventAccumulator(str(board)).Reload()
    assert set(events.Tags()["images"]) == {"plots/reward", "plots/mismatch"}
    assert [image.step for image in events.Images("plots/reward")] == [20, 40], "the last step once"
    assert events.Images("plots/reward")[0].encoded_image_string.startswith(b"\x89PNG")


def test_images_reach_wandb(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = PlotCallback(small_run, SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[])))
    with wandb.init(dir=str(tmp_path)) as tracked:
        state = SimpleNamespace(is_world_process_zero=True, global_step=40)
        log.on_save(TrainingArguments(report_to=["wandb"]), state, None)
        folder = Path(tracked.dir)
    names = sorted(path.name.rsplit("_", 2)[0] for path in (folder / "media" / "images" / "plots").glob("*.png"))
    assert names == ["mismatch", "reward"]


def test_images_reach_trackio(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = []
    tracker = SimpleNamespace(Image=imread, log=lambda metrics, step: logged.append((step, metrics)))
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    log = PlotCallback(small_run, SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[])))
    log.on_save(
        SimpleNamespace(report_to=["trackio"]), SimpleNamespace(is_world_process_zero=True, global_step=4), None
    )
    ended = SimpleNamespace(is_world_process_zero=True, global_step=5)
    log.on_train_end(SimpleNamespace(report_to=["trackio"]), ended, None)  # transformers has already ended its run
    [(step, images)] = logged
    assert step == 4 and set(images) == {"plots/reward", "plots/mismatch"}
    assert all((image == imread(small_run / f"{name}.png")).all() for name, image in images.items())


def test_only_the_main_process_draws_and_nothing_before_the_first_step(tmp_path: Path) -> None:
    log = PlotCallback(tmp_path, SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[])))
    log.on_train_end(TrainingArguments(report_to=[]), SimpleNamespace(is_world_process_zero=True, global_step=0), None)
    write_training(tmp_path, [step_line(1, 0.5)])
    log.on_save(TrainingArguments(report_to=[]), SimpleNamespace(is_world_process_zero=False, global_step=1), None)
    assert not (tmp_path / "plots").exists()


def test_a_critic_s_first_steps_do_not_hide_the_others(run: Path) -> None:
    axes = Figure().subplots()
    assert ppo_plot.PPO_PANELS[0](axes, load_run(run))
    each_step = axes.get_lines()[0].get_xydata().tolist()
    assert each_step[0] == [1, -1] and each_step[-1] == [40, pytest.approx(0.4)], "−7 is drawn at the edge"
