"""Rounds of a benchmark of whole steps: programs that train with one configuration, one after the other, and the
figures of each, kept in a folder, so that the same command goes on where it was stopped."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.supervision_arms import Bench
from classroom_rl.config.load import ROOT
from classroom_rl.launch.small_tutor import arithmetic, find_model
from classroom_rl.results.run_folder import METRICS_NAME, read_lines, step_seconds

PROJECT = "this project"
SHAPES = ("quickstart", "small_tutor")
CONVERSATIONS = 64
"""Of a batch of both shapes."""


@dataclass(frozen=True)
class Round:
    """A program's median seconds of a step, the mean reward of its steps, and the messages of a step."""

    seconds: float
    reward: float
    messages: float

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> "Round":
        """The figures of a program's lines, one for each step."""
        return cls(
            step_seconds(lines), fmean(line["reward"] for line in lines), fmean(line["messages"] for line in lines)
        )


def code_version(source: Path = ROOT) -> str:
    """A hash of what a checkout computes with: its benchmarks, configurations, prompts and sources, with changes that
    are not committed."""
    folders = ("benchmarks", "config", "prompt_templates", "src")
    digest = hashlib.sha256()
    for command in (["ls-tree", "HEAD", *folders], ["diff", "HEAD", "--", *folders]):
        digest.update(subprocess.run(["git", *command], cwd=source, check=False, capture_output=True).stdout)
    return digest.hexdigest()[:12]


class Rounds:
    """The measured rounds of a folder.

    Args:
        settings: what all rounds of the folder have in common, besides the code; a folder that was begun with others,
            or with other code, is refused. The programs belong here: they are compared because they took turns.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self._folder, self._results = folder, folder / "rounds.jsonl"
        settings = {**settings, "code": code_version()}
        settings_file = folder / "settings.json"
        folder.mkdir(parents=True, exist_ok=True)
        if not settings_file.is_file():
            settings_file.write_text(json.dumps(settings), encoding="utf-8")
        elif (earlier_settings := json.loads(settings_file.read_text(encoding="utf-8"))) != settings:
            sys.exit(f"{folder} holds rounds with {earlier_settings}, not with {settings}: choose another --folder.")

    def measure(self, number: int, program: str, play: Callable[[Path], Round]) -> Round:
        """A program's figures in a round: those that are kept, or measured now.

        Args:
            play: runs the program in a folder, which is not there yet; after `end` it is removed.
        """
        recorded = [line for line in read_lines(self._results) if (line["round"], line["program"]) == (number, program)]
        if recorded:
            return Round(**{name: recorded[0][name] for name in ("seconds", "reward", "messages")})
        program_folder = self.folder_of(number, program)
        shutil.rmtree(program_folder, ignore_errors=True)
        result = play(program_folder)
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": number, "program": program, **asdict(result)}) + "\n")
        print(f"round {number + 1}, {program}: {result.seconds:.1f} s", flush=True)
        return result

    def folder_of(self, number: int, program: str) -> Path:
        """The folder in which a program runs; once its round has ended it is not needed any more."""
        return self._folder / f"round{number}" / program.replace(" ", "_")

    def end(self, number: int) -> None:
        """Remove the folders of a round whose programs are all measured."""
        shutil.rmtree(self._folder / f"round{number}", ignore_errors=True)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Have processes compute without a pause, as other programs of a laptop do; they end with the context."""
    loop = "while True: pass"
    started = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def play_project(
    folder: Path,
    overrides: Sequence[str],
    steps: int,
    port: int,
    command: Sequence[str] = ("./start_rl_training.sh",),
    source: Path = ROOT,
) -> Round:
    """A short training by this project.

    Args:
        command: starts server and trainer; it is given the overrides.
        source: the checkout that trains.
    """
    run_overrides = [
        f"train.max_steps={steps + 1}",
        f"generation.server_port={port}",
        f"logging.save_dir={folder / 'run'}",
    ]
    run_in([*command, *overrides, *run_overrides], folder, source)
    train = yaml.safe_load((folder / "run" / "config" / "train_rl.yaml").read_text())["train"]
    conversations = train["number_of_problems_per_batch"] * train["num_samples_per_problem"]
    lines = [line for line in read_lines(folder / "run" / METRICS_NAME) if "reward" in line]
    return Round.of([line | {"messages": conversations * line["conversation/messages"]} for line in lines])


def take_out(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder, if they are not there."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(unfinished)], input=archive.stdout, check=True)
    # Renamed once complete, so that a stopped run leaves no half-filled folder under the final name.
    unfinished.rename(folder)


def full_name(commit: str) -> str:
    """The hash of a commit: a branch may be another one tomorrow.

    Raises:
        subprocess.CalledProcessError: if there is no such commit; git has said so.
    """
    command = ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def run_in(command: Sequence[str], folder: Path, source: Path = ROOT) -> None:
    """Run a program of a checkout, which must end with status 0; what it prints goes into the folder's output.log."""
    folder.mkdir(parents=True)
    # The checkout's package, not the installed one. Before version 0.2 `src` itself was the package, whose `vllm` would
    # hide the library of that name.
    is_package = (source / "src" / "classroom_rl").is_dir()
    environment = {**os.environ, "PYTHONPATH": str(source / "src" if is_package else source)}
    with (folder / "output.log").open("w") as log:
        done = subprocess.run(command, cwd=source, env=environment, check=False, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{(folder / 'output.log').read_text()}")


def overrides_of(shape: str, models: Path) -> list[str]:
    """The training's overrides, with models and arithmetic of this machine."""
    if shape == "small_tutor":
        return ["--config-name", shape, f"teacher_model.model_name_or_path={find_model()}", *arithmetic()]
    if not (models / "sft" / "model").is_dir():
        sys.exit(f"{models} has no fine-tuned model: run make quickstart-models, or give --models.")
    overrides = Bench(models, models.resolve(), steps=0, port=0).overrides(models)
    return [
        override for override in overrides if not override.startswith(("logging.save_dir", "generation.server_port"))
    ]
