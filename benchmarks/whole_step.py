"""A whole step of training (rollout, judging, gradients, publishing): this project against TRL alone, and its bound.

    python -m benchmarks.whole_step quickstart [--models runs/quickstart] [--rounds 5] [--steps 4]
    python -m benchmarks.whole_step small_tutor

The two take turns, so that what else runs on the machine meets both. Each round starts both programs anew. The times
are those between the ends of two steps, so what loads and warms up is left out; a round counts with its median. Both
play as many conversations on the same lessons, with the same prompts, limits, judge and arguments of TRL. How many
messages these have is shown beside the times: it depends on what the models say. TRL alone is `benchmarks.trl_alone`,
without this project's changes to TRL and torch (src/grpo/log_probs.py, src/training/cpu.py).
The bound is `benchmarks.step_bound`: this project's messages again, without anything but models, gradients and weights.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.supervision_arms import Bench
from config.load import ROOT
from src.launch.small_tutor import find_model
from src.results.run_folder import METRICS_NAME, read_lines

PROJECT, BOUND, TRL_ALONE = "this project", "bound", "TRL alone"
CONVERSATIONS = 64
"""Of a batch of both configurations."""


@dataclass(frozen=True)
class Round:
    """A program's median seconds of a step, the mean reward of its steps, and the messages of a step."""

    seconds: float
    reward: float
    messages: float

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> "Round":
        """The figures of a program's lines, one for each step."""
        seconds = median(after["time"] - before["time"] for before, after in pairwise(lines))
        return cls(seconds, fmean(line["reward"] for line in lines), fmean(line["messages"] for line in lines))


def play_project(folder: Path, overrides: Sequence[str], steps: int, port: int) -> Round:
    """A short training by this project."""
    own = [f"train.max_steps={steps + 1}", f"generation.server_port={port}", f"logging.save_dir={folder / 'run'}"]
    _run(["./start_rl_training.sh", *overrides, *own], folder)
    lines = [line for line in read_lines(folder / "run" / METRICS_NAME) if "reward" in line]
    return Round.of([line | {"messages": CONVERSATIONS * line["conversation/messages"]} for line in lines])


def replay_bound(folder: Path, overrides: Sequence[str], played: Round) -> Round:
    """The bound of the training that `play_project` made in this folder's neighbour."""
    run = folder.parent / "project" / "run"
    _run([sys.executable, "-m", "benchmarks.step_bound", str(run), *overrides], folder)
    lines = (folder / "output.log").read_text().splitlines()
    seconds = json.loads(next(line for line in reversed(lines) if line.startswith("{")))["step"]
    return replace(played, seconds=median(seconds[1:]))


def play_trl_alone(folder: Path, overrides: Sequence[str], steps: int) -> Round:
    """A short training by TRL alone."""
    out = folder / "steps.jsonl"
    own = [f"train.max_steps={steps + 1}", f"logging.save_dir={folder / 'run'}"]
    _run([sys.executable, "-m", "benchmarks.trl_alone", str(out), *overrides, *own], folder)
    return Round.of(read_lines(out))


def _run(command: Sequence[str], folder: Path) -> None:
    folder.mkdir(parents=True)
    with (folder / "output.log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{(folder / 'output.log').read_text()}")


def overrides_of(shape: str, models: Path) -> list[str]:
    """The training's overrides, with models of this machine."""
    if shape == "small_tutor":
        return ["--config-name", shape, f"teacher_model.model_name_or_path={find_model()}"]
    if not (models / "sft" / "model").is_dir():
        sys.exit(f"{models} has no fine-tuned model: run make quickstart-models, or give --models.")
    ours = Bench(models, models.resolve(), steps=0, port=0).overrides(models)
    return [each for each in ours if not each.startswith(("logging.save_dir", "generation.server_port"))]


def report(rounds: Mapping[str, Sequence[Round]]) -> str:
    """Each program's times and figures, and the ratio of the rounds."""
    out = ["                seconds of a step, by round             median   messages   reward"]
    for name, found in rounds.items():
        shown = ", ".join(f"{each.seconds:.1f}" for each in found)
        middle, messages = median(each.seconds for each in found), fmean(each.messages for each in found)
        out.append(f"{name:15} {shown:40} {middle:5.1f} {messages:10.0f} {fmean(each.reward for each in found):8.3f}")
    pairs = list(zip(rounds[TRL_ALONE], rounds[PROJECT], strict=True))
    ratio = median(alone.seconds / ours.seconds for alone, ours in pairs)
    per_message = median((alone.seconds / alone.messages) / (ours.seconds / ours.messages) for alone, ours in pairs)
    above = median(ours.seconds / least.seconds for ours, least in zip(rounds[PROJECT], rounds[BOUND], strict=True))
    out.append(f"this project takes {above:.2f} x the time of its bound")
    out.append(f"TRL alone takes {ratio:.2f} x the time of a step, {per_message:.2f} x per message (medians of rounds)")
    return "\n".join(out)


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=["quickstart", "small_tutor"])
    parser.add_argument("--models", type=Path, default=Path("runs/quickstart"), help="the folder of quickstart-models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a round")
    parser.add_argument("--port", type=int, default=8061)
    arguments = parser.parse_args()
    overrides = overrides_of(arguments.shape, arguments.models)
    found: dict[str, list[Round]] = {PROJECT: [], BOUND: [], TRL_ALONE: []}
    with TemporaryDirectory() as kept:
        for number in range(arguments.rounds):
            own = Path(kept) / str(number)
            ours = play_project(own / "project", overrides, arguments.steps, arguments.port)
            alone = play_trl_alone(own / "trl", overrides, arguments.steps)
            least = replay_bound(own / "bound", overrides, ours)
            found[PROJECT].append(ours)
            found[BOUND].append(least)
            found[TRL_ALONE].append(alone)
            print(f"round {number + 1}: {ours.seconds:.1f} s, {least.seconds:.1f} s, {alone.seconds:.1f} s", flush=True)
    print(report(found))


if __name__ == "__main__":
    main()
