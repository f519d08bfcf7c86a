"""A callback that reports a training while it runs: in `metrics.jsonl` in the run folder, and as a progress bar or
lines of text."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Optional

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from classroom_rl.errors import ClassroomError
from classroom_rl.results.run_folder import METRICS_NAME, last_figures, read_lines


def last_metrics(run_folder: Path) -> dict[str, Any]:
    """The last value of each metric in `metrics.jsonl`; empty if there is no such file."""
    return last_figures(read_lines(run_folder / METRICS_NAME))


class MetricsCallback(TrainerCallback):
    """Writes a line to `metrics.jsonl` for every optimizer step, and shows a progress bar on a terminal, or lines with
    an ETA elsewhere.

    Args:
        run_folder: the folder of `metrics.jsonl`. If a resumed run repeats steps, their lines are replaced.
        every_s: the least seconds between two lines of text; the last step is always shown.
    """

    def __init__(self, run_folder: Path, every_s: float = 0.0):
        self._path = run_folder / METRICS_NAME
        self._every_s = every_s
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
        left = round(seconds_a_step * (state.max_steps - state.global_step))
        text = self.describe(line)
        print(f"step {state.global_step}/{state.max_steps}  {text}  ETA {left // 60}:{left % 60:02}", flush=True)

    def _drop_lines_after(self, step: int) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        self._path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
