"""Kills the trainer, the server and the engines of real runs with SIGKILL, again and again, restarts each killed
program with its own command, and compares the results with those of an undisturbed run:

    python -m tests.support.kills [--config-name quickstart] [--kills 10] [--steps 18]
                                  [--targets trainer server engine] [--folder runs/kills]

The phases of a step (rollout, judging or review, publish, optimizer step, checkpoint) are hit in turn, at a random
moment. With `--config-name quickstart_supervised` or `marooned`, a supervisor reads the messages, and corrections are
trained on between the steps. The exit status is 1 if a run differs, loses a conversation, asks for a verdict twice, or
makes its supervised passes at other steps.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from classroom_rl.config.load import ROOT
from classroom_rl.errors import ClassroomError
from classroom_rl.launch.commands import server_command, trainer_command
from classroom_rl.models.policy_folder import policies_folder, shared_memory_folder
from classroom_rl.rollout.environment import POLICY_ROLE
from classroom_rl.rollout.store.journal import HEAD_LENGTH, JOURNAL_NAME, head_of, read_journal
from classroom_rl.rollout.store.journal_segments import JournalStream
from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.processes import Child, Signals
from tests.conftest import free_port, quickstart_overrides

PHASES = ("rollout", "judging", "review", "publish", "optimizer step", "checkpoint")
_NOT_IN = {"quickstart": "review", "quickstart_supervised": None, "marooned": "judging"}
"""The phase that a configuration does not have."""
_RUN_LIMIT_S = 1800.0
_PHASE_LIMIT_S = 40.0


@dataclass
class Outcome:
    """The result of one run.

    Attributes:
        steps: the logged steps.
        schedules: step → (problem id, personas of the student's turns) of each conversation.
        played_twice: the number of conversations with a turn that was sampled more than once.
        judged_twice: the number of verdicts that were asked for more than once.
        lost: the number of conversations that were never finished.
        passes: the number of supervised passes after each step; empty without a supervisor.
    """

    steps: list[int]
    schedules: dict[int, list[tuple[str, tuple[str, ...]]]]
    played_twice: int
    judged_twice: int
    lost: int
    passes: list[float]
    kills: Counter = field(default_factory=Counter)
    seconds: float = 0.0


class Run:
    """A server and a trainer on one run folder. Each is restarted whenever it is found dead.

    Args:
        more: further overrides of both programs.
    """

    longest_delay_s = 0.3
    """How long after the first sign of a phase a strike may come."""

    def __init__(
        self, config_name: str, folder: Path, world: Path, steps: int, signals: Signals, more: Sequence[str] = ()
    ):
        self.folder, self.steps, self._signals = folder, steps, signals
        self.phases = [phase for phase in PHASES if phase != _NOT_IN[config_name]]
        self.port = free_port()
        self._overrides = [
            *overrides_of(config_name, folder, world, self.port),
            f"train.max_steps={steps}",
            "logging.save_steps=2",
            *more,
        ]
        self.client = ClassroomClient(f"http://127.0.0.1:{self.port}")
        self.start()

    def start(self) -> None:
        """Start the programs."""
        self.server = self._start_server()
        self.trainer = self._start_trainer()

    def _start_server(self) -> Child:
        return Child("the server", server_command(self._overrides), self._signals, self.folder / "server.log")

    def _start_trainer(self) -> Child:
        return Child("the trainer", self._trainer_command(), self._signals, self.folder / "trainer.log")

    def _trainer_command(self) -> list[str]:
        return trainer_command(["--config_file", "config/accelerate/1CPU.yaml"], self._overrides)

    def go_on(self) -> bool:
        """Restart what died; returns False once the training has ended."""
        self._signals.check()
        if self.server.poll() is not None:
            self.server.stop()
            self.server = self._start_server()
        status = self.trainer.poll()
        if status == 0:
            return False
        if status is not None:
            self.trainer.stop()
            self.trainer = self._start_trainer()
        return True

    def pid_of(self, target: str) -> int | None:
        """The process id of the target; None if it is not running at the moment."""
        if target == "server":
            return self.server.pid if self.server.poll() is None else None
        if target == "trainer":
            return next((child.pid for child in _descendants(self.trainer.pid) if _is_training(child)), None)
        try:
            roles = self.client.health().roles
        except ClassroomError:
            return None
        return random.choice([pid for role in roles.values() for pid in role.pids])

    def stop(self) -> None:
        self.trainer.stop()
        self.server.stop()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _is_training(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return (
        not {"train_rl.py", "classroom_rl.launch.train"}.isdisjoint(command)
        and "accelerate.commands.launch" not in command
    )


_PHASE_OF_EVENT = {
    "conversation": "optimizer step",
    "verdict": "judging",
    "draft": "review",
    "turn": "rollout",
}
"""By event of the journal: what a run does now. Of several new events, the first here tells."""


class Watch:
    """Tells from the run folder which phase a run is in."""

    def __init__(self, folder: Path):
        self._journal, self._checkpoints = folder / JOURNAL_NAME, folder / "checkpoints" / "unfinished"
        self._policies = (policies_folder(folder), shared_memory_folder(folder))
        self._read = 0
        self._new_events()

    def phase(self) -> str | None:
        if self._checkpoints.exists():
            return "checkpoint"
        if any(path for folder in self._policies for path in folder.glob("*.unfinished")):
            return "publish"
        events = self._new_events()
        return next((phase for event, phase in _PHASE_OF_EVENT.items() if event in events), None)

    def _new_events(self) -> set[str]:
        try:
            stream = JournalStream(self._journal)
        except FileNotFoundError:
            return set()
        events = set()
        with stream:
            for position, line in stream.lines(self._read):
                self._read = position + len(line)
                events.add((head_of(line[:HEAD_LENGTH]) or ("",))[0])
        return events


def kill(pid: int) -> None:
    """Kill a process, unless it has ended already."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).send_signal(signal.SIGKILL)


def killing(target: str) -> Callable[[Run], int | None]:
    """Kills the target of a run; returns its process id, None if it is not running at the moment."""

    def strike(run: Run) -> int | None:
        pid = run.pid_of(target)
        if pid is not None:
            kill(pid)
        return pid

    return strike


def play(
    run: Run,
    wanted: Sequence[str],
    strike: Callable[[Run], int | None],
    generator: random.Random,
    limit_s: float = _RUN_LIMIT_S,
) -> Counter:
    """Let a run go on to its end, and strike once in each of the wanted phases, one after the other; returns the
    strikes by phase.

    Args:
        strike: returns the id of the process that it hit; None if it could not do it at the moment.

    Raises:
        TimeoutError: if the run does not end within `limit_s` seconds.
    """
    strikes: Counter = Counter()
    wanted = list(wanted)
    watch, moving_since = Watch(run.folder), None
    deadline = time.monotonic() + limit_s
    while run.go_on():
        if time.monotonic() > deadline:
            raise TimeoutError(f"The run in {run.folder} did not end within {limit_s:g} s; its logs are there.")
        phase = watch.phase()
        if phase is not None and moving_since is None:
            moving_since = time.monotonic()  # the program that was hit last is working again
        impatient = moving_since is not None and time.monotonic() - moving_since > _PHASE_LIMIT_S
        if wanted and phase is not None and (phase == wanted[0] or impatient):
            time.sleep(generator.uniform(0, run.longest_delay_s))
            pid = strike(run)
            if pid is not None:
                strikes[phase] += 1
                wanted.pop(0)
                print(f"  hit {pid} in phase {phase}; {len(wanted)} to go", flush=True)
                time.sleep(0.5)
                watch, moving_since = Watch(run.folder), None
        time.sleep(0.002)
    if wanted:
        print(f"  the run ended before {len(wanted)} of its kills", flush=True)
    return strikes


def outcome_of(folder: Path) -> Outcome:
    """Read the result of a run from its folder."""
    events = list(read_journal(folder / JOURNAL_NAME))
    records = {event["conversation"]: event["record"] for event in events if event["event"] == "conversation"}
    turns = Counter(event["conversation"] for event in events if event["event"] == "turn")
    drafts = Counter(event["conversation"] for event in events if event["event"] == "draft")
    twice = {name for name, count in turns.items() if name in records and count > len(records[name]["turns"])}
    twice |= {name for name, count in drafts.items() if name in records and count > _messages(records[name])}
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    verdicts = Counter(_verdict_key(event) for event in events if event["event"] == "verdict")
    schedules = defaultdict(list)
    for record in sorted(records.values(), key=lambda each: (each["step"], each["index"])):
        personas = tuple(turn["persona"] for turn in record["turns"] if turn["role"] == "student")
        schedules[record["step"]].append((record["problem_id"], personas))
    requests = {event["request"] for event in events if event["event"] == "batch"}
    return Outcome(
        steps=[line["step"] for line in metrics],
        schedules=dict(schedules),
        played_twice=len(twice),
        judged_twice=sum(count > 1 for count in verdicts.values()),
        lost=sum(16 - sum(name.startswith(request) for name in records) for request in requests),
        passes=[line["corrections/passes"] for line in metrics if "corrections/passes" in line],
    )


def _messages(record: dict) -> int:
    """The number of messages of the policy that entered a conversation."""
    return sum(turn["role"] == POLICY_ROLE for turn in record["turns"])


def _verdict_key(event: dict) -> tuple[str, str, int]:
    return event["conversation"], event["verdict"]["rule"], event["verdict"]["attempt"]


def agrees(schedule: list, wanted: list) -> bool:
    """Whether two schedules have the same problems in the same places, and the same personas as far as both
    conversations go."""
    return len(schedule) == len(wanted) and all(
        problem == other and all(a == b for a, b in zip(personas, others, strict=False))
        for (problem, personas), (other, others) in zip(schedule, wanted, strict=True)
    )


def differences(outcome: Outcome, alone: Outcome, steps: int) -> list[str]:
    """How a run differs from one that was left alone, and what it must not have done."""
    faults = []
    if outcome.steps != list(range(1, steps + 1)):
        faults.append(f"it logged the steps {outcome.steps}")
    same = outcome.schedules.keys() == alone.schedules.keys() and all(
        agrees(outcome.schedules[step], alone.schedules[step]) for step in alone.schedules
    )
    if not same:
        faults.append("it has other problems or personas")
    if outcome.passes != alone.passes:
        faults.append(f"it made supervised passes after {outcome.passes}, not {alone.passes}")
    for name in ("played_twice", "judged_twice", "lost"):
        if getattr(outcome, name):
            faults.append(f"{getattr(outcome, name)} {name}")
    return faults


def make_world(folder: Path, config_name: str) -> Path:
    """The untrained model, and the lessons or islands of a configuration."""
    module = (
        "classroom_rl.environments.marooned.world"
        if config_name == "marooned"
        else "classroom_rl.environments.toy_language.build"
    )
    world = folder / module.split(".")[1]
    if not world.is_dir():
        command = [sys.executable, "-m", module, "--out", str(world)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return world


def overrides_of(config_name: str, folder: Path, world: Path, port: int) -> list[str]:
    """Batches of 16 short conversations with an untrained model, and supervised passes where corrections are made."""
    if config_name != "marooned":
        overrides = quickstart_overrides(folder, world / "blank", world, port)
        overrides[overrides.index("quickstart")] = config_name
        return overrides + (["train.corrections.min_examples=32"] if config_name != "quickstart" else [])
    return [
        *("--config-name", config_name),
        f"logging.save_dir={folder}",
        f"generation.server_port={port}",
        "generation.max_turns=6",
        "generation.max_tokens_per_turn=16",
        f"teacher_model.model_name_or_path={world / 'blank'}",
        f"dataset.train_datasets=[{{name_or_path: {world / 'islands_train.jsonl'}}}]",
        "train.number_of_problems_per_batch=4",
        "train.num_samples_per_problem=4",
        "train.corrections={interval: 3, min_examples: 32}",
    ]


def run_all(arguments: argparse.Namespace) -> Iterator[tuple[str, Outcome]]:
    """Make the undisturbed run, then one run for each target."""
    world = make_world(arguments.folder, arguments.config_name)
    with Signals() as signals:
        for target in [None, *arguments.targets]:
            name = target or "none"
            folder = arguments.folder / name
            shutil.rmtree(folder, ignore_errors=True)
            print(f"{name}: {arguments.steps} steps", flush=True)
            started = time.monotonic()
            run = Run(arguments.config_name, folder, world, arguments.steps, signals)
            phases = [run.phases[i % len(run.phases)] for i in range(arguments.kills)] if target else []
            try:
                kills = play(run, phases, killing(target or ""), random.Random(f"{arguments.seed}|{name}"))
            finally:
                run.stop()
            outcome = outcome_of(folder)
            outcome.kills, outcome.seconds = kills, time.monotonic() - started
            yield name, outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config-name", choices=list(_NOT_IN), default="quickstart")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--targets", nargs="*", default=["trainer", "server", "engine"])
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    outcomes = dict(run_all(arguments))
    undisturbed, good = outcomes["none"], True
    phases = [phase for phase in PHASES if phase != _NOT_IN[arguments.config_name]]
    ends = ("steps", "passes", "twice played", "twice judged", "lost", "s", "as undisturbed")
    heads = ("killed", "kills", *phases, *ends)
    rows = [heads]
    for name, outcome in outcomes.items():
        faults = differences(outcome, undisturbed, arguments.steps)
        good &= not faults
        kills = [outcome.kills[phase] for phase in phases]
        counts = (outcome.played_twice, outcome.judged_twice, outcome.lost, round(outcome.seconds))
        passes = round(outcome.passes[-1]) if outcome.passes else 0
        rows.append((name, sum(kills), *kills, len(outcome.steps), passes, *counts, "; ".join(faults) or "yes"))
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(heads))]
    for row in rows:
        print("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
