"""The results of a GPU check: figures of the parts, the table, and the report of an interrupted check."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from classroom_rl.config.train_rl import TrainConfig
from classroom_rl.memory.budget import GIB
from classroom_rl.results.run_folder import step_seconds
from classroom_rl.results.step_time import sampled_tokens_per_second
from classroom_rl.system.gpu_figures import training_flops
from classroom_rl.system.gpu_memory import MemoryWatch

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
REPORT = "gpu_check.json"
"""The file with all results, in the check's folder."""
LARGEST_MISMATCH = 0.05
"""Between the log-probs of engine and trainer, in nats per token."""


@dataclass
class PartResult:
    """The result of a part: its measured `figures` by name, and a `reason` if it is not ok."""

    part: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def step_figures(line: Mapping[str, float], train: TrainConfig) -> dict[str, float]:
    """The figures from one line of metrics.jsonl."""
    conversations = train.number_of_problems_per_batch * train.num_samples_per_problem
    figures = {"teacher tokens/s": sampled_tokens_per_second(line, conversations)}
    return figures | {f"{name} s": line[f"seconds/{name}"] for name in ("rollout", "publish", "train")}


def check_mismatch(result: PartResult, lines: Sequence[Mapping[str, float]]) -> PartResult:
    """The result with the largest mismatch of the steps' lines as a figure, failed if it is too large: the mean
    distance between the log-probs of the engine that sampled and those of the trainer, in nats per token."""
    mismatch = max(line["mismatch/mean_abs_logprob_diff"] for line in lines)
    result.figures["mismatch"] = mismatch
    if mismatch > LARGEST_MISMATCH:
        result.status = FAILED
        result.reason = (
            f"engine and trainer differ by {mismatch:.3f} nats per token, where {LARGEST_MISMATCH} are allowed: the "
            "engine does not sample from the weights that were published, or computes them differently"
        )
    return result


def shape_figures(
    lines: Sequence[Mapping[str, float]],
    train: TrainConfig,
    watch: MemoryWatch,
    moments: Mapping[str, int],
    parameters: int,
) -> dict[str, float]:
    """The figures of a run's last step: `step_figures`, the rate of the training (`training_flops`), and the peak
    memory of rollout and training together with the budget's estimates (`moments`). With several steps, also the
    median seconds between their ends."""
    tokens = lines[-1]["num_tokens"] - (lines[-2]["num_tokens"] if len(lines) > 1 else 0)
    train_end = lines[-1]["time"]
    rollout_end = train_end - lines[-1]["seconds/train"]
    rollout_start = rollout_end - lines[-1]["seconds/rollout"]
    figures = step_figures(lines[-1], train) | ({"step s": step_seconds(lines)} if len(lines) > 1 else {})
    figures |= {
        "training TFLOP/s": training_flops(parameters) * tokens / lines[-1]["seconds/train"] / 1e12,
        "rollout peak GiB": watch.peak(rollout_start, rollout_end) / GIB,
        "rollout, by dry_run": moments["rollout"] / GIB,
        "training peak GiB": watch.peak(rollout_end, train_end) / GIB,
        "training, by dry_run": max(moments["backward pass"], moments["optimizer step"]) / GIB,
    }
    return {name: round(value, 3) for name, value in figures.items()}


def table(results: Sequence[PartResult]) -> str:
    """Format the results for the terminal."""
    lines = []
    for result in results:
        lines.append(f"{result.part:<12} {_verdict(result)}")
        lines += [f"{'':<12} {name:<24}{value:>12.2f}" for name, value in result.figures.items()]
    return "\n".join(lines)


def _verdict(result: PartResult) -> str:
    return f"{result.status} ({result.seconds:.0f} s)" + (f": {result.reason}" if result.reason else "")


def read_results(folder: Path) -> list[PartResult]:
    """The results that a check has left in its folder; none without a report."""
    if not (folder / REPORT).is_file():
        return []
    return [PartResult(**part) for part in json.loads((folder / REPORT).read_text(encoding="utf-8"))["parts"]]
