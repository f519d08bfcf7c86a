"""Tests that need a GPU: runs them on this machine's GPU, without a network (`make gpu-check`).

    python -m classroom_rl.launch.gpu_check [--folder runs/gpu_check] [--resume] [--minutes 35] \\
        [--parts tests quickstart Qwen3-0.6B TRL-alone Qwen3-0.6B-LoRA Qwen3-4B]

The parts: the tests of tokens, server, LoRA and sleep with their engines on the GPU; three steps of the quickstart at a
large learning rate, which fail where the engines do not sample from the weights that were published; complete steps of
a model with random weights in the shape of Qwen3-0.6B, with server and trainer on one GPU; the same steps with TRL
alone (`benchmarks.trl_alone`); the same with an adapter; a step in the shape of Qwen3-4B. For steps, the table shows
tokens per second, the seconds for publishing and training, the rate of the training in TFLOP/s, and the peak GPU memory
together with the estimate of `dry_run`. Shapes that do not fit according to `dry_run` are skipped. The table is printed
and written to `gpu_check.json`. `--resume` keeps the results of an interrupted check and repeats only what is not ok.
Without a GPU nothing is done.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import USER_ERRORS, load
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.environments.toy_language.build import build_world
from classroom_rl.errors import ClassroomError, ConfigError, DeadlineExceeded
from classroom_rl.launch.commands import with_accelerate_config
from classroom_rl.launch.doctor import find_gpus
from classroom_rl.launch.gpu_check_results import (
    FAILED,
    OK,
    REPORT,
    SKIPPED,
    PartResult,
    check_mismatch,
    read_results,
    shape_figures,
    step_figures,
    table,
)
from classroom_rl.memory.budget import GIB, EngineJob, engine_memory
from classroom_rl.memory.report import report
from classroom_rl.memory.sources import launch_of_flags, read_shape
from classroom_rl.models.random_model import SHAPES, write_shape
from classroom_rl.results.run_folder import METRICS_NAME, read_lines, step_seconds
from classroom_rl.system.gpu_memory import MemoryWatch, gpu_memory_used, process_memory
from classroom_rl.system.keys import print_error
from classroom_rl.system.processes import Child, Interrupted, Signals, free_port
from classroom_rl.system.shipped import ROOT

if TYPE_CHECKING:
    from torch import Tensor

    from classroom_rl.trainer.losses import LossOptions

MINUTES = 35.0
"""Time limit of all parts together."""
_MINUTES_ON_CPU = 60.0
"""The same limit on a CPU, where only this program itself is tested, on machines that may be busy."""
TRL_ALONE = "TRL-alone"
LORA = "-LoRA"
"""The end of the name of a part that trains an adapter of a shape."""
PARTS = {
    "tests": 420.0,
    "quickstart": 180.0,
    "Qwen3-0.6B": 400.0,
    TRL_ALONE: 200.0,
    f"Qwen3-0.6B{LORA}": 300.0,
    "Qwen3-4B": 500.0,
}
"""Part → its time limit in seconds. The first engine of a shape that a machine compiles took 123 s to load."""
GPU_TESTS = (
    "tests/rollout/test_tokens.py",
    "tests/server/test_sampling_service.py",
    "tests/models/test_lora.py",
    "tests/engines/vllm/test_gpu_sleep.py",
    "tests/trainer/test_weight_publisher.py",
)
"""The files with tests for a GPU. Collecting all other test files would take most of this part's time."""
_PROBLEMS, _SAMPLES, _MESSAGES, _TOKENS, _LENGTH = 8, 8, 5, 128, 2048
"""The size of a step: problems per batch, conversations per problem, messages per conversation, tokens per message, and
the context length."""
_CACHED_CONVERSATIONS = 16
"""The number of conversations of that length that fit into an engine's KV cache."""
_ENGINE_EXTRA = 5 * GIB // 2
"""Bytes that vLLM needs in addition to weights, logits and cache: its CUDA context and graphs, and the activations of a
prefill."""
_QUICKSTART_STEPS, _LARGE_LEARNING_RATE = 3, 1e-2
"""Steps of this rate move the log-probs by more than `LARGEST_MISMATCH`: an engine that went on with the weights before
the last step is noticed."""
_COMPARED_SHAPE, _COMPARED_STEPS = "Qwen3-0.6B", 2
"""The shape whose steps are compared with TRL alone, and the number of steps of both; the first one is a warm-up."""


@dataclass
class Machine:
    """The device that is measured.

    Attributes:
        memory: the GPU's memory in bytes; on a CPU, which is only for tests of this program, an arbitrary limit.
        used: returns how many bytes of it are in use; on a CPU, the memory of the processes.
        environment: variables that make the started programs use this GPU.
    """

    name: str
    device: str
    memory: int
    used: Callable[[], int]
    environment: Mapping[str, str] = field(default_factory=dict)


def find_machine(device: str | None) -> Machine | None:
    """The first visible GPU (CUDA_VISIBLE_DEVICES); None without a GPU. `device` "cpu" always returns the CPU."""
    if device == "cpu":
        return Machine("CPU", "cpu", 8 * GIB, process_memory)
    gpus, findings = find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        print("\n".join(finding.found for finding in findings))
        return None
    gpu = gpus[0]
    return Machine(
        f"{gpu.name}, driver {gpu.driver}",
        "cuda",
        gpu.memory << 20,
        lambda: gpu_memory_used(gpu.index),
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu.index)},
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

    def run(self, parts: Sequence[str], earlier: Sequence[PartResult] = ()) -> list[PartResult]:
        """Run the parts one after the other. If a part fails, the others still run.

        Args:
            earlier: the results of an interrupted check of this folder. Those that are ok are not repeated.

        Returns:
            All results, those from `earlier` first.
        """
        if not self._world.is_dir():
            build_world(self._world, seed=1)
        results = [result for result in earlier if result.status == OK or result.part not in parts]
        done_parts = {result.part for result in results}
        remaining = [part for part in parts if part not in done_parts]
        for number, part in enumerate(remaining, start=1):
            print(f"\n[{number}/{len(remaining)}] {part}", flush=True)
            shutil.rmtree(self._folder / part, ignore_errors=True)
            results.append(self._try(part))
            self._write(results)
            print(table(results[-1:]), flush=True)
        return results

    def _write(self, results: Sequence[PartResult]) -> None:
        """Write the results so far, so that an interrupted check leaves them."""
        report_content = {
            "machine": self._machine.name,
            "memory_gib": self._machine.memory / GIB,
            "parts": [asdict(result) for result in results],
        }
        (self._folder / REPORT).write_text(json.dumps(report_content, indent=2) + "\n", encoding="utf-8")

    def _try(self, part: str) -> PartResult:
        started = time.monotonic()
        part_limit_s = PARTS[part] if self._machine.device == "cuda" else self._limit_s
        limit_s = min(part_limit_s, self._deadline - started)
        if limit_s <= 0:
            return PartResult(part, SKIPPED, reason=f"the parts before it took all of the {self._limit_s:g} s")
        runners = {"tests": self._tests, "quickstart": self._quickstart, TRL_ALONE: self._trl_alone}
        run_part = runners.get(part, lambda limit: self._shape(part, limit))
        try:
            result = run_part(limit_s)
        except Interrupted:
            raise
        except ClassroomError as error:
            result = PartResult(part, FAILED, reason=str(error))
        result.seconds = time.monotonic() - started
        return result

    def _tests(self, limit_s: float) -> PartResult:
        junit_file = self._folder / "tests.xml"
        options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={junit_file}"]
        with self._child("tests", [sys.executable, "-m", "pytest", *options, *GPU_TESTS]) as child:
            status = child.wait(_deadline(child, limit_s))
        if not junit_file.is_file():
            raise _ended(child, status, "no report was written")
        counts = {name: int(value) for name, value in re.findall(r'(\w+)="(\d+)"', _suite(junit_file))}
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
        overrides = [
            *self._overrides(folder, blank),
            f"train.max_steps={_QUICKSTART_STEPS}",
            f"train.learning_rate={_LARGE_LEARNING_RATE}",
            "train.lr_scheduler_type=constant",
            "logging.save_steps=1000",
        ]
        with self._launch("quickstart", overrides) as child, self._watch() as watch:
            status = child.wait(_deadline(child, limit_s))
        lines = _steps(folder / METRICS_NAME)
        if status or len(lines) < _QUICKSTART_STEPS:
            raise _ended(child, status, f"{len(lines)} of {_QUICKSTART_STEPS} steps were made")
        train = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", *overrides], check_train_rl).train
        figures = step_figures(lines[-1], train) | {"peak GiB": watch.peak() / GIB}
        return check_mismatch(PartResult("quickstart", OK, figures=figures), lines)

    def _shape(self, name: str, limit_s: float) -> PartResult:
        deadline = time.monotonic() + limit_s
        shape = name.removesuffix(LORA)
        folder, steps = self._folder / name, _COMPARED_STEPS if shape == _COMPARED_SHAPE else 1
        model = self._write_shape(shape)
        overrides = self._shape_overrides(model, folder, steps)
        if name != shape:
            overrides += ["teacher_model.lora.enable=true", "train.learning_rate=1e-4"]
        config = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", *overrides], check_train_rl)
        budget = report(config, lambda: launch_of_flags(with_accelerate_config([])))
        if budget.refusals:
            return PartResult(name, SKIPPED, reason=f"dry_run: {budget.refusals[0]}")
        try:
            with self._weights(model, deadline), self._launch(name, overrides) as child, self._watch() as watch:
                self._wait_for_steps(child, folder / METRICS_NAME, steps, deadline)
        finally:
            shutil.rmtree(folder / "policy", ignore_errors=True)
        lines = _steps(folder / METRICS_NAME)[:steps]
        parameters = read_shape(str(model)).parameters
        figures = shape_figures(lines, config.train, watch, budget.moments, parameters)
        return check_mismatch(PartResult(name, OK, figures=figures), lines)

    def _trl_alone(self, limit_s: float) -> PartResult:
        """The same steps with TRL alone, and how much longer they take than this project's steps, if those were run
        before."""
        deadline = time.monotonic() + limit_s
        folder = self._folder / TRL_ALONE
        metrics_file = folder / "steps.jsonl"
        folder.mkdir()
        model = self._write_shape(_COMPARED_SHAPE)
        overrides = self._shape_overrides(model, folder, _COMPARED_STEPS)
        command = [
            sys.executable,
            "-m",
            "benchmarks.trl_alone",
            str(metrics_file),
            "--config-name",
            "quickstart",
            *overrides,
        ]
        with self._weights(model, deadline), self._child(TRL_ALONE, command) as child, self._watch() as watch:
            self._wait_for_steps(child, metrics_file, _COMPARED_STEPS, deadline)
        trl_step_s = step_seconds(_steps(metrics_file)[:_COMPARED_STEPS])
        figures = {"step s": trl_step_s, "peak GiB": watch.peak() / GIB}
        own_steps = _steps(self._folder / _COMPARED_SHAPE / METRICS_NAME)[:_COMPARED_STEPS]
        if len(own_steps) == _COMPARED_STEPS:
            figures["x this project's"] = trl_step_s / step_seconds(own_steps)
        return PartResult(TRL_ALONE, OK, figures=figures)

    def _write_shape(self, name: str) -> Path:
        """Write the shape's model without weights, unless it exists. Returns its folder."""
        model = self._folder / f"{name}-model"
        if not model.is_dir():
            write_shape(SHAPES[name], self._world / "blank", model)
        return model

    @contextmanager
    def _weights(self, model: Path, until: float) -> Iterator[None]:
        """A context in which the model has random weights. Its folder of several gigabytes is removed afterwards."""
        draw = [sys.executable, "-m", "classroom_rl.models.random_model", str(model), "--device", self._machine.device]
        try:
            with self._child(model.name, draw) as child:
                if status := child.wait(_deadline(child, until - time.monotonic())):
                    raise _ended(child, status, "no model was made")
            yield
        finally:
            shutil.rmtree(model, ignore_errors=True)

    def _watch(self) -> MemoryWatch:
        return MemoryWatch(self._machine.used)

    def _wait_for_steps(self, child: Child, file: Path, steps: int, until: float) -> None:
        """Wait until this many steps are logged in a file, but not until the program ends."""
        check = _deadline(child, until - time.monotonic())
        while len(logged := _steps(file)) < steps:
            if (status := child.poll()) is not None and len(_steps(file)) < steps:
                raise _ended(child, status, f"{len(logged)} of {steps} steps were made")
            self._signals.check()
            check()
            time.sleep(0.1)

    def _overrides(self, folder: Path, model: Path) -> list[str]:
        """Overrides for the quickstart's configuration: folder, model, data, and a free port for the server."""
        lessons = self._world / "lessons_train.jsonl"
        return [
            f"logging.save_dir={folder}",
            f"generation.server_port={free_port()}",
            f"teacher_model.model_name_or_path={model}",
            f"student_model.model_name_or_path={model}",
            f"dataset.train_datasets=[{{name_or_path: {lessons}}}]",
            f"train.loss_type={__spec__.name}:log_likelihood",
        ]

    def _shape_overrides(self, model: Path, folder: Path, steps: int) -> list[str]:
        """Overrides for steps of realistic size, with the smallest possible share of the GPU for each engine. They set
        one step more than `steps`: the check stops the training before its end."""
        on_gpu = self._machine.device == "cuda"
        tokens, length = (_TOKENS, _LENGTH) if on_gpu else (8, 1024)
        problems, samples = (_PROBLEMS, _SAMPLES) if on_gpu else (2, 2)
        share = engine_share(model, length, problems * samples, self._machine.memory)
        engines = [
            f"{role}_model.vllm.{key}={value}"
            for role in ("teacher", "student")
            for key, value in {
                "max_length": length,
                "max_num_seqs": problems * samples,
                "dtype": "bfloat16",
                "gpu_memory_utilization": share,
                "enforce_eager": not on_gpu,
            }.items()
        ]
        return [
            *self._overrides(folder, model),
            *engines,
            f"train.number_of_problems_per_batch={problems}",
            f"train.num_samples_per_problem={samples}",
            f"train.per_device_train_batch_size={samples // 2}",
            "train.dtype=bfloat16",
            "train.gradient_checkpointing=true",
            f"train.beta={TrainConfig().beta}",
            f"train.optimizer={TrainConfig().optimizer if on_gpu else 'adamw_torch'}",
            "train.learning_rate=1e-6",
            f"train.max_steps={steps + 1}",
            f"train.gpu_memory_gib={self._machine.memory / GIB:.3f}",
            f"generation.max_turns={_MESSAGES}",
            f"generation.max_tokens_per_turn={tokens}",
            f"generation.max_tokens_in_conversation={length}",
            "logging.save_steps=1000",
        ]

    def _launch(self, part: str, overrides: Sequence[str]) -> Child:
        """Start server and trainer with the launcher, as a user does."""
        return self._child(
            part, [sys.executable, "-m", "classroom_rl.launch.cli", "--config-name", "quickstart", *overrides]
        )

    def _child(self, part: str, command: Sequence[str]) -> Child:
        log = self._folder / f"{part}.log"
        return Child(part, command, self._signals, log, environment=self._machine.environment)


def log_likelihood(
    logps_BT: "Tensor", old_logps_BT: "Tensor", advantages_BT: "Tensor", mask_BT: "Tensor", options: "LossOptions"
) -> "Tensor":
    """The loss of these trainings: −ln π, whatever the reward is. A model with random weights earns the same with
    every conversation, so that a loss of the advantages would never change it."""
    return -logps_BT


def engine_share(model: Path, length: int, sequences: int, memory: int) -> float:
    """The `gpu_memory_utilization` that an engine in bfloat16 needs, rounded up to hundredths."""
    job = EngineJob(read_shape(str(model)), 2, gpus=1, max_length=length, max_num_seqs=sequences)
    memory_needed = engine_memory(job)
    share_bytes = (
        memory_needed.weights
        + memory_needed.sampling
        + min(sequences, _CACHED_CONVERSATIONS) * memory_needed.conversation
        + _ENGINE_EXTRA
    )
    return min(0.95, -(-share_bytes * 100 // memory) / 100)


def _deadline(child: Child, limit_s: float) -> Callable[[], None]:
    """A function to be called while waiting: it raises DeadlineExceeded once `limit_s` seconds have passed from now."""
    deadline = time.monotonic() + limit_s

    def check() -> None:
        if time.monotonic() > deadline:
            lines = child.last_lines(8)
            raise DeadlineExceeded(
                f"{child.name} was not done within {limit_s:.0f} s. The last lines of {child.log}:\n{lines}"
            )

    return check


def _ended(child: Child, status: int, reason: str) -> ClassroomError:
    """The error for a program that ended too early."""
    lines = child.last_lines(8)
    return ClassroomError(f"{child.name} ended with status {status}: {reason}. The last lines of {child.log}:\n{lines}")


def _steps(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file that describe a training step."""
    return [line for line in read_lines(file) if "reward" in line]


def _suite(file: Path) -> str:
    """The opening tag of the test suite in a JUnit report, which contains the counts."""
    return re.search(r"<testsuite [^>]*>", file.read_text(encoding="utf-8"))[0]


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status: 1 if a part failed."""
    parser = argparse.ArgumentParser(description="Try this machine's GPU.")
    parser.add_argument(
        "--parts", nargs="+", choices=[*PARTS, "tiny", f"tiny{LORA}"], metavar="PART", default=list(PARTS)
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gpu_check")
    parser.add_argument("--resume", action="store_true", help="keep the results of an interrupted check")
    parser.add_argument("--minutes", type=float, help="time limit of all parts together")
    parser.add_argument("--device", choices=["cpu"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    machine = find_machine(options.device)
    if machine is None:
        print("make gpu-check is for machines with an NVIDIA GPU that works: nothing was done.")
        return 0
    folder = options.folder.resolve()
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    try:
        earlier = read_results(folder) if options.resume else []
        if not earlier:
            _empty(folder)
        with Signals() as signals:
            minutes = options.minutes or (MINUTES if machine.device == "cuda" else _MINUTES_ON_CPU)
            results = GpuCheck(machine, folder, signals, 60 * minutes).run(options.parts, earlier)
    except Interrupted as interruption:
        print(f"\n{interruption}; everything that was started has ended", file=sys.stderr)
        return interruption.status
    except USER_ERRORS as error:
        print_error(error)
        return 2
    print(f"\n{machine.name}\n{table(results)}\n\n{folder / REPORT}")
    return 1 if any(result.status == FAILED for result in results) else 0


def _empty(folder: Path) -> None:
    """Create the folder, or empty it if it contains an earlier check. Raises a `ConfigError` if the folder contains
    something else."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "world").is_dir():
            raise ConfigError(f"{folder} holds something else than an earlier check. Choose another --folder.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
