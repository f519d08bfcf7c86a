"""Callbacks that report a training while it runs: `metrics.jsonl` and plots in the run folder, lines on the terminal,
and images in trackers.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Optional

from accelerate import Accelerator
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from classroom_rl.errors import ClassroomError
from classroom_rl.results.plots import write_plots
from classroom_rl.results.run_folder import METRICS_NAME, last_figures, load_run, read_lines
from classroom_rl.results.supervision_summary import REVIEW_COLUMNS, review_rows
from classroom_rl.rollout.trajectory import Trajectory


def last_metrics(run_folder: Path) -> dict[str, Any]:
    """The last value of each metric in `metrics.jsonl`; empty if there is no such file."""
    return last_figures(read_lines(run_folder / METRICS_NAME))


class MetricsCallback(TrainerCallback):
    """Writes a line to `metrics.jsonl` for every optimizer step, and shows a progress bar on a terminal, or lines with
    an ETA elsewhere.

    Args:
        run_folder: the folder of `metrics.jsonl`. If a resumed run repeats steps, their lines are replaced.
        every_s: the least seconds between two lines of text; the last step is always shown.
        on_line: these are called with each line, once it is written.
    """

    def __init__(
        self, run_folder: Path, every_s: float = 0.0, on_line: Sequence[Callable[[dict[str, Any]], None]] = ()
    ):
        self._path = run_folder / METRICS_NAME
        self._every_s, self._on_line = every_s, on_line
        self._bar: Optional[tqdm] = None
        self._started = self._shown = 0.0
        self._first_step = 0

    def describe(self, line: dict[str, Any]) -> str:
        """The text that shows a line of metrics to the user."""
        return "  ".join(f"{name} {line[name]:.4g}" for name in ("loss", "eval_loss") if name in line)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._started = time.monotonic()
        self._first_step = state.global_step
        if state.is_world_process_zero:
            self._drop_lines_after(state.global_step)
            terminal = sys.stderr.isatty()
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=not terminal)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Optional[dict[str, Any]] = None,
        **_: Any,
    ) -> None:
        """Record and show the logged metrics.

        Raises:
            ClassroomError: if the loss is not finite, because such a training cannot recover.
        """
        if logs is None or not {"loss", "eval_loss"} & set(logs):
            return
        if not math.isfinite(logs.get("loss", 0.0)):
            raise ClassroomError(
                f"The loss is {logs['loss']} at step {state.global_step}: the training has diverged. Lower "
                "train.learning_rate, or train in float32."
            )
        if not state.is_world_process_zero:
            return
        line = {"step": state.global_step, "time": time.time(), **logs}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        for callback in self._on_line:
            callback(line)
        self._show(line, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self, line: dict[str, Any], state: TrainerState) -> None:
        if self._bar is not None and not self._bar.disable:
            self._bar.set_postfix_str(self.describe(line), refresh=False)
            self._bar.update(state.global_step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._shown < self._every_s and state.global_step < state.max_steps:
            return
        self._shown = now
        seconds_a_step = (now - self._started) / max(state.global_step - self._first_step, 1)
        eta_s = round(seconds_a_step * (state.max_steps - state.global_step))
        text = self.describe(line)
        print(f"step {state.global_step}/{state.max_steps}  {text}  ETA {eta_s // 60}:{eta_s % 60:02}", flush=True)

    def _drop_lines_after(self, step: int) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        self._path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


_OF_THE_BATCH = ("seconds/rollout", "seconds/publish", "seconds/eval")


class GRPOMetricsCallback(MetricsCallback):
    """Splits each step's time into rollout, publishing, evaluation and training. A batch is sampled in the first of its
    `mu` steps."""

    _mark = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        self._mark = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            now = time.monotonic()
            other_phases_s = sum(logs.get(name) or 0.0 for name in _OF_THE_BATCH)
            logs = {**logs, "seconds/train": now - self._mark - other_phases_s}
            self._mark = now
        super().on_log(args, state, control, logs)

    def describe(self, line: dict[str, Any]) -> str:
        parts = []
        if line.get("reward") is not None:
            parts.append(f"reward {line['reward']:.3f} ± {line.get('reward_std') or 0.0:.3f}")
        for name in ("rollout", "publish", "train"):
            if line.get(f"seconds/{name}") is not None:
                parts.append(f"{name} {line[f'seconds/{name}']:.1f} s")
        for role, label in (("judge", "judged"), ("student", "student answered")):
            if line.get(f"{role}/run_cost_usd"):
                parts.append(f"{label} for ${line[f'{role}/run_cost_usd']:.4f} so far")
        return "  ".join(parts)


class PlotCallback(TrainerCallback):
    """Draws the plots with every checkpoint and at the end, on the main process.

    Args:
        trainer: the trainer whose trackers get the plots.
    """

    def __init__(self, run_folder: Path, trainer: Trainer):
        self._run_folder = run_folder
        self._trainer = trainer
        self._drawn_at = -1

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._draw(args.report_to, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._draw([name for name in args.report_to if name != "trackio"], state)  # trackio's run has ended by now

    def _draw(self, trackers: Collection[str], state: TrainerState) -> None:
        drawn = state.global_step == self._drawn_at or not (self._run_folder / METRICS_NAME).exists()
        if state.is_world_process_zero and not drawn:
            self._drawn_at = state.global_step
            self._show(write_plots(load_run(self._run_folder)), trackers, state)

    def _show(self, paths: list[Path], trackers: Collection[str], state: TrainerState) -> None:
        from matplotlib.image import imread

        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                for path in paths:
                    image = imread(path)
                    callback.tb_writer.add_image(f"plots/{path.stem}", image, state.global_step, dataformats="HWC")
        if "wandb" in trackers:
            import wandb

            images = {f"plots/{path.stem}": wandb.Image(str(path)) for path in paths}
            wandb.log({**images, "train/global_step": state.global_step})
        if "trackio" in trackers:
            import trackio

            trackio.log({f"plots/{path.stem}": trackio.Image(str(path)) for path in paths}, step=state.global_step)


def show_conversations(records: Sequence[Trajectory], trackers: Collection[str], accelerator: Accelerator) -> None:
    """Send a batch's conversations, and the supervisor's reviews, to Weights & Biases as tables, if it is
    configured."""
    if "wandb" not in trackers or not accelerator.is_main_process:
        return
    import wandb

    table = wandb.Table(columns=["step", "conversation", "problem", "transcript", "reward"])
    for record in records:
        transcript = "\n".join(f"{turn.role}: {turn.text}" for turn in record.turns)
        table.add_data(record.step, record.id, record.problem, transcript, record.reward)
    tables = {"conversations": table}
    if reviews := review_rows(records):
        tables["reviews"] = wandb.Table(columns=list(REVIEW_COLUMNS), data=[list(row) for row in reviews])
    wandb.log(tables, commit=False)
