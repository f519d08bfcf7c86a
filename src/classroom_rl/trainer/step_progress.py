"""What a GRPO training shows of each step: the reward, and the seconds of rollout, publishing and training."""

import time
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from classroom_rl.trainer.metrics_callback import MetricsCallback

_OF_THE_BATCH = ("seconds/rollout", "seconds/publish")


class GRPOMetricsCallback(MetricsCallback):
    """Splits each step's time into rollout, publishing and training. A batch is sampled in the first of its `mu`
    steps."""

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
            elsewhere = sum(logs.get(name) or 0.0 for name in _OF_THE_BATCH)
            logs = {**logs, "seconds/train": now - self._mark - elsewhere}
            self._mark = now
        super().on_log(args, state, control, logs)

    def describe(self, line: dict[str, Any]) -> str:
        parts = []
        if line.get("reward") is not None:
            parts.append(f"reward {line['reward']:.3f} ± {line.get('reward_std') or 0.0:.3f}")
        for name in ("rollout", "publish", "train"):
            if line.get(f"seconds/{name}") is not None:
                parts.append(f"{name} {line[f'seconds/{name}']:.1f} s")
        for seat, done in (("judge", "judged"), ("student", "student answered")):
            if line.get(f"{seat}/run_cost_usd"):
                parts.append(f"{done} for ${line[f'{seat}/run_cost_usd']:.4f} so far")
        return "  ".join(parts)
