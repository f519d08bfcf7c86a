"""What a user sees of the training, and the metrics file that reports are made from."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

METRICS_NAME = "metrics.jsonl"
_OF_THE_BATCH = ("seconds/rollout", "seconds/publish")


class Progress(TrainerCallback):
    """One line per optimizer step: a bar on a terminal, plain lines elsewhere; and `metrics.jsonl` in the run folder.

    Each step's time is split into rollout, publishing and training. A batch is sampled in the first of its passes.
    """

    def __init__(self, run_folder: Path):
        self._path = run_folder / METRICS_NAME
        self._bar: tqdm | None = None
        self._mark = self._started = 0.0
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._mark = self._started = time.monotonic()
        self._first_step = state.global_step
        if state.is_world_process_zero:
            self._drop_lines_after(state.global_step)
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=not sys.stderr.isatty())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict | None = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero or logs is None or "reward" not in logs and "loss" not in logs:
            return
        now = time.monotonic()
        other = sum(logs.get(name) or 0.0 for name in _OF_THE_BATCH)
        line = {"step": state.global_step, "time": time.time(), **logs, "seconds/train": now - self._mark - other}
        self._mark = now
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._show(line, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self, line: dict[str, Any], state: TrainerState) -> None:
        parts = []
        if line.get("reward") is not None:
            parts.append(f"reward {line['reward']:.3f} ± {line.get('reward_std') or 0.0:.3f}")
        for name in ("rollout", "publish", "train"):
            if line.get(f"seconds/{name}") is not None:
                parts.append(f"{name} {line[f'seconds/{name}']:.1f} s")
        text = "  ".join(parts)
        if self._bar is not None and not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(state.global_step - self._bar.n)
            return
        done = state.global_step - self._first_step
        left = (time.monotonic() - self._started) / max(done, 1) * (state.max_steps - state.global_step)
        print(f"step {state.global_step}/{state.max_steps}  {text}  ETA {left // 60:.0f} min {left % 60:02.0f} s", flush=True)

    def _drop_lines_after(self, step: int) -> None:
        """Forget steps that a resumed run makes again."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        self._path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
