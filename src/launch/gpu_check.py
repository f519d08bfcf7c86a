"""Tests on this machine's GPU what a CPU cannot show, within ten minutes and without a network: `make gpu-check`.

    python -m src.launch.gpu_check [--parts tests quickstart Qwen3-0.6B Qwen3-4B] [--folder runs/gpu_check]

The parts, in this order: the tests of tokens, server, LoRA and sleep with their engines on the GPU; three steps of the
quickstart; one complete step of a model with random weights in the shape of Qwen3-0.6B, then of Qwen3-4B, with server
and trainer on one GPU. For steps, the table shows tokens per second, the seconds of publishing and training, and the
peak GPU memory beside the estimate of `dry_run`. Shapes that do not fit according to `dry_run` are skipped. The table
goes to the terminal and into `gpu_check.json`. Without a GPU nothing is done.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from config.checks import check_train_rl
from config.load import ROOT, USER_ERRORS, load
from config.train_rl_model import TrainConfig, TrainRLConfig
from src.errors import ClassroomError, ConfigError, DeadlineExceeded
from src.launch.commands import with_accelerate_config
from src.launch.doctor import find_gpus
from src.memory.budget import GIB, EngineJob, engine_memory
from src.memory.report import report
from src.memory.sources import launch_of_flags, read_shape
from src.models.random_model import SHAPES, write_shape
from src.results.run_folder import METRICS_NAME
from src.system.gpu_memory import MemoryWatch, gpu_memory_used, process_memory
from src.system.keys import print_error
from src.system.ports import free_port
from src.system.processes import Child, Interrupted, Signals
from src.toy_language.build import build_world

LIMIT_S = 600.0
"""Time limit of all parts together, in seconds."""
_LIMIT_ON_CPU_S = 3600.0
"""The same limit on a CPU, where only this program itself is tested, on machines that may be busy."""
PARTS = {"tests": 190.0, "quickstart": 110.0, "Qwen3-0.6B": 110.0, "Qwen3-4B": 190.0}
"""Part → its time limit in seconds."""
OK, FAILED, SKIPPED = "ok", "failed", "skipped"

_GROUPS, _GROUP, _MESSAGES, _TOKENS, _LENGTH = 8, 8, 5, 128, 2048
"""The step of a shape: problems per batch, conversations per problem, messages per conversation, tokens per message,
and the context length."""
_CACHED = 16
"""An engine's KV cache has room for this many conversations of that length."""
_ENGINE_EXTRA = 3 * GIB // 2
"""Bytes that vLLM needs besides weights, logits and cache: its CUDA context, and the activations of a prefill."""
_QUICKSTART_STEPS = 3


@dataclass
class PartResult:
    """The result of a part: its measured `figures` by name, and a `reason` if it is not ok."""

    part: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class Machine:
    """The device that is measured.

    Attributes:
        memory: the GPU's memory in bytes; on a CPU, which serves for tests of this program, a made-up limit.
        used: reads how many bytes of it are in use; on a CPU, the memory of the processes.
        environment: variables that make the started programs use this GPU.
    """

    name: str
    device: str
    memory: int
    used: Callable[[], int]
    environment: Mapping[str, str] = field(default_factory=dict)


def find_machine(device: str | None) -> Machine | None:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves visible; None without a GPU. `device` "cpu" always returns the
    CPU."""
    if device == "cpu":
        return Machine("CPU", "cpu", 8 * GIB, process_memory)
    gpus, findings = find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        print("\n".join(finding.found for finding in findings))
        return None
    first = gpus[0]
    return Machine(
        f"{first.name}, driver {first.driver}",
        "cuda",
        first.memory << 20,
        lambda: gpu_memory_used(first.index),
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(first.index)},
    )


class GpuCheck:
    """One run of the parts.

    Args:
        folder: an empty folder for all files.
        limit_s: the time limit of all parts together, in seconds.
    """

    def __init__(self, machine: Machine, folder: Path, signals: Signals, limit_s: float):
        self._machine, self._folder, self._signals = machine, folder, signals
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._world = folder / "world"

    def run(self, parts: Sequence[str]) -> list[PartResult]:
        """Run the parts one after the other. If a part fails, the others still run."""
        build_world(self._world, seed=1)
        outcomes = []
        for part in parts:
            print(f"\n[{len(outcomes) + 1}/{len(parts)}] {part}", flush=True)
            outcomes.append(self._try(part))
            print(f"{part}: {_verdict(outcomes[-1])}", flush=True)
        return outcomes

    def _try(self, part: str) -> PartResult:
        started = time.monotonic()
        own_s = PARTS[part] if self._machine.device == "cuda" else self._limit_s
        limit_s = min(own_s, self._deadline - started)
        if limit_s <= 0:
            return PartResult(part, SKIPPED, reason=f"the parts before it took all of the {self._limit_s:g} s")
        do = {"tests": self._tests, "quickstart": self._quickstart}.get(part, lambda limit: self._shape(part, limit))
        try:
            outcome = do(limit_s)
        except Interrupted:
            raise
        except ClassroomError as error:
            outcome = PartResult(part, FAILED, reason=str(error))
        outcome.seconds = time.monotonic() - started
        return outcome

    def _tests(self, limit_s: float) -> PartResult:
        report_file = self._folder / "tests.xml"
        options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report_file}"]
        with self._child("tests", [sys.executable, "-m", "pytest", *options]) as child:
            status = child.wait(_deadline(child, limit_s))
        if not report_file.is_file():
            raise _ended(child, status, "no report was written")
        counts = {name: int(value) for name, value in re.findall(r'(\w+)="(\d+)"', _suite(report_file))}
        failed = counts["failures"] + counts["errors"]
        figures = {
            "passed": counts["tests"] - failed - counts["skipped"],
            "failed": failed,
            "skipped": counts["skipped"],
        }
        if status or not figures["passed"]:
            return PartResult("tests", FAILED, reason=f"see {child.log}", figures=figures)
        return PartResult("tests", OK, figures=figures)

    def _quickstart(self, limit_s: float) -> PartResult:
        blank = self._world / "blank"
        folder = self._folder / "quickstart"
        overrides = [*self._overrides(folder, blank), f"train.max_steps={_QUICKSTART_STEPS}", "logging.save_steps=1000"]
        with self._launch("quickstart", overrides) as child, MemoryWatch(self._machine.used) as watch:
            status = child.wait(_deadline(child, limit_s))
        lines = _metrics(folder)
        if status or len(lines) < _QUICKSTART_STEPS:
            raise _ended(child, status, f"{len(lines)} of {_QUICKSTART_STEPS} steps were made")
        train = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", *overrides], check_train_rl).train
        return PartResult("quickstart", OK, figures=step_figures(lines[-1], train) | {"peak GiB": watch.peak() / GIB})

    def _shape(self, name: str, limit_s: float) -> PartResult:
        started = time.monotonic()
        model, folder = self._folder / f"{name}-model", self._folder / name
        write_shape(SHAPES[name], self._world / "blank", model)
        overrides = [*self._overrides(folder, model), *self._shape_overrides(model)]
        config = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", *overrides], check_train_rl)
        budget = report(config, lambda: launch_of_flags(with_accelerate_config([])))
        if budget.refusals:
            return PartResult(name, SKIPPED, reason=f"dry_run: {budget.refusals[0]}")
        try:
            draw = [sys.executable, "-m", "src.models.random_model", str(model), "--device", self._machine.device]
            with self._child(f"{name}-model", draw) as child:
                if status := child.wait(_deadline(child, limit_s)):
                    raise _ended(child, status, "no model was made")
            left_s = limit_s - (time.monotonic() - started)
            with self._launch(name, overrides) as child, MemoryWatch(self._machine.used) as watch:
                self._until_first_step(child, folder, left_s)
        finally:
            for gigabytes in (model, folder / "policy"):
                shutil.rmtree(gigabytes, ignore_errors=True)
        return PartResult(name, OK, figures=shape_figures(_metrics(folder)[0], config.train, watch, budget.moments))

    def _until_first_step(self, child: Child, folder: Path, limit_s: float) -> None:
        """Wait until the first step is logged; the second step and its checkpoint are not awaited."""
        check = _deadline(child, limit_s)
        while not _metrics(folder):
            if (status := child.poll()) is not None:
                raise _ended(child, status, "no step was made")
            self._signals.check()
            check()
            time.sleep(0.1)

    def _overrides(self, folder: Path, model: Path) -> list[str]:
        """Overrides of the quickstart's configuration: folder, model, data, and a free port for the server."""
        lessons = self._world / "lessons_train.jsonl"
        return [
            f"logging.save_dir={folder}",
            f"generation.server_port={free_port()}",
            f"teacher_model.model_name_or_path={model}",
            f"student_model.model_name_or_path={model}",
            f"dataset.train_datasets=[{{name_or_path: {lessons}}}]",
        ]

    def _shape_overrides(self, model: Path) -> list[str]:
        """Overrides for a step of realistic size, with the smallest possible share of the GPU for each engine."""
        on_gpu = self._machine.device == "cuda"
        tokens, length = (_TOKENS, _LENGTH) if on_gpu else (8, 1024)
        groups, group = (_GROUPS, _GROUP) if on_gpu else (2, 2)
        share = engine_share(model, length, groups * group, self._machine.memory)
        engines = [
            f"{seat}_model.vllm.{key}={value}"
            for seat in ("teacher", "student")
            for key, value in {
                "max_length": length,
                "max_num_seqs": groups * group,
                "dtype": "bfloat16",
                "gpu_memory_utilization": share,
            }.items()
        ]
        return [
            *engines,
            f"train.number_of_problems_per_batch={groups}",
            f"train.num_samples_per_problem={group}",
            f"train.per_device_train_batch_size={group // 2}",
            "train.dtype=bfloat16",
            "train.gradient_checkpointing=true",
            f"train.beta={TrainConfig().beta}",
            f"train.optimizer={TrainConfig().optimizer if on_gpu else 'adamw_torch'}",
            "train.learning_rate=1e-6",
            "train.max_steps=2",
            f"train.gpu_memory_gib={self._machine.memory / GIB:.3f}",
            f"generation.max_turns={_MESSAGES}",
            f"generation.max_tokens_per_turn={tokens}",
            f"generation.max_tokens_in_conversation={length}",
            "logging.save_steps=1000",
        ]

    def _launch(self, part: str, overrides: Sequence[str]) -> Child:
        """Start server and trainer with the launcher, as a user does."""
        return self._child(part, [sys.executable, "-m", "src.launch.cli", "--config-name", "quickstart", *overrides])

    def _child(self, part: str, command: Sequence[str]) -> Child:
        log = self._folder / f"{part}.log"
        return Child(part, command, self._signals, log, environment=self._machine.environment)


def engine_share(model: Path, length: int, sequences: int, memory: int) -> float:
    """The `gpu_memory_utilization` that an engine in bfloat16 needs, rounded up to hundredths."""
    job = EngineJob(read_shape(str(model)), 2, gpus=1, max_length=length, max_num_seqs=sequences)
    needs = engine_memory(job)
    wanted = needs.weights + needs.sampling + min(sequences, _CACHED) * needs.conversation + _ENGINE_EXTRA
    return min(0.95, -(-wanted * 100 // memory) / 100)


def step_figures(line: Mapping[str, float], train: TrainConfig) -> dict[str, float]:
    """The figures of one line of metrics.jsonl. Tokens per second are the teacher's sampled tokens divided by the time
    of the whole rollout, which includes the student's turns and the judging."""
    conversations = train.number_of_problems_per_batch * train.num_samples_per_problem
    figures = {"teacher tokens/s": line["conversation/teacher_tokens"] * conversations / line["seconds/rollout"]}
    return figures | {f"{name} s": line[f"seconds/{name}"] for name in ("rollout", "publish", "train")}


def shape_figures(
    line: Mapping[str, float], train: TrainConfig, watch: MemoryWatch, moments: Mapping[str, int]
) -> dict[str, float]:
    """The figures of a run's first step: `step_figures`, and the peak memory of rollout and training beside the
    budget's estimates (`moments`)."""
    ended = line["time"]
    sampled = ended - line["seconds/train"]
    began = sampled - line["seconds/rollout"]
    figures = step_figures(line, train) | {
        "rollout peak GiB": watch.peak(began, sampled) / GIB,
        "rollout, by dry_run": moments["rollout"] / GIB,
        "training peak GiB": watch.peak(sampled, ended) / GIB,
        "training, by dry_run": max(moments["backward pass"], moments["optimizer step"]) / GIB,
    }
    return {name: round(value, 3) for name, value in figures.items()}


def table(outcomes: Sequence[PartResult]) -> str:
    """Format the results for the terminal."""
    lines = []
    for outcome in outcomes:
        lines.append(f"{outcome.part:<12} {_verdict(outcome)}")
        lines += [f"{'':<12} {name:<24}{value:>12.2f}" for name, value in outcome.figures.items()]
    return "\n".join(lines)


def _verdict(outcome: PartResult) -> str:
    return f"{outcome.status} ({outcome.seconds:.0f} s)" + (f": {outcome.reason}" if outcome.reason else "")


def _deadline(child: Child, limit_s: float) -> Callable[[], None]:
    """A function for waits to call: it raises DeadlineExceeded after `limit_s` seconds from now."""
    until = time.monotonic() + limit_s

    def check() -> None:
        if time.monotonic() > until:
            lines = child.last_lines(8)
            raise DeadlineExceeded(
                f"{child.name} was not done within {limit_s:.0f} s. The last lines of {child.log}:\n{lines}"
            )

    return check


def _ended(child: Child, status: int, what: str) -> ClassroomError:
    lines = child.last_lines(8)
    return ClassroomError(f"{child.name} ended with status {status}: {what}. The last lines of {child.log}:\n{lines}")


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics.jsonl that describe a step."""
    path = folder / METRICS_NAME
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "seconds/train" in line]


def _suite(file: Path) -> str:
    """The opening tag of the test suite in a JUnit report; it holds the counts."""
    return re.search(r"<testsuite [^>]*>", file.read_text(encoding="utf-8"))[0]


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status: 1 if a part failed."""
    parser = argparse.ArgumentParser(description="Try this machine's GPU.")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "tiny"], metavar="PART", default=list(PARTS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gpu_check")
    parser.add_argument("--device", choices=["cpu"], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    machine = find_machine(given.device)
    if machine is None:
        print("make gpu-check is for machines with an NVIDIA GPU that works: nothing was done.")
        return 0
    folder = given.folder.resolve()
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    try:
        _empty(folder)
        with Signals() as signals:
            limit_s = LIMIT_S if machine.device == "cuda" else _LIMIT_ON_CPU_S
            outcomes = GpuCheck(machine, folder, signals, limit_s).run(given.parts)
    except Interrupted as interruption:
        print(f"\n{interruption}; everything that was started has ended", file=sys.stderr)
        return interruption.status
    except USER_ERRORS as error:
        print_error(error)
        return 2
    written = {
        "machine": machine.name,
        "memory_gib": machine.memory / GIB,
        "parts": [asdict(each) for each in outcomes],
    }
    (folder / "gpu_check.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    print(f"\n{machine.name}\n{table(outcomes)}\n\n{folder / 'gpu_check.json'}")
    return 1 if any(each.status == FAILED for each in outcomes) else 0


def _empty(folder: Path) -> None:
    """Create the folder, or empty it if it holds an earlier check.

    Raises:
        ConfigError: if the folder holds something else.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "world").is_dir():
            raise ConfigError(f"{folder} holds something else than an earlier check. Choose another --folder.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
