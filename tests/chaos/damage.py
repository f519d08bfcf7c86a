"""A full disk in each phase, and files that were damaged while nothing ran: a torn journal line, a truncated
checkpoint, a missing shard of the weights that were published last."""

import errno
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from classroom_rl.rollout.store.journal import JOURNAL_NAME
from tests.chaos.cases import Case, LeftOut, Settings
from tests.chaos.kills import kill_all
from tests.chaos.programs import wait_for
from tests.chaos.trainings import LIMIT_S, Disturb, Training, log_of, phases_in_turn, training_case, wait_for_step
from tests.support.kills import PHASES, play

_DISK = "300m"
_FULL_FOR_S = 30.0
_ZEROS = bytes(1 << 16)
_CHECKPOINT_FILES = {"optimizer": "optimizer.pt", "model": "*.safetensors", "state": "trainer_state.json"}
"""By case: the file of a checkpoint that is cut in half."""


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of its own under the run folder; its logs stay.

    Raises:
        LeftOut: where mounting is not allowed.
    """
    run = folder / "run"
    run.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(run)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        raise LeftOut(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        for log in run.glob("*.log"):
            shutil.copy(log, folder / log.name)
        subprocess.run(["umount", str(run)], check=True)


def fill(folder: Path) -> Path:
    """Take all space of a disk; returns the file that takes it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:  # block by block, because the programs write meanwhile, too
                file.write(_ZEROS)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return filler


def _fill_for_a_while(training: Training, ended: list[str]) -> int | None:
    """Fill the disk until a program has ended for it, or for half a minute."""
    if training.pid_of("trainer") is None or training.pid_of("server") is None:
        return None
    filler = fill(training.folder)
    deadline = time.monotonic() + _FULL_FOR_S
    programs = {"trainer": training.trainer, "server": training.server}
    while time.monotonic() < deadline and not (dead := [name for name, program in programs.items() if program.poll()]):
        time.sleep(0.1)
    ended += dead
    filler.unlink()
    return training.provider.pid


def disk_cases(settings: Settings) -> list[Case]:
    """The disk is full once in each phase."""

    def fills(first: int) -> Disturb:
        def disturb(training: Training, own: Settings, generator: random.Random) -> Counter:
            ended: list[str] = []
            hits = play(training, phases_in_turn(3, first), partial(_fill_for_a_while, ended=ended), generator, LIMIT_S)
            log_text = log_of(training)
            if ended and "Make room there" not in log_text:
                raise RuntimeError(f"{', '.join(ended)} ended, and no log says that there has to be room on the disk")
            return hits + Counter(f"{name} ended" for name in ended)

        return disturb

    return [
        training_case("disk", f"full-{number}", fills(first), around=small_disk)
        for number, first in enumerate(range(0, len(PHASES), 3), start=1)
    ]


def _tear_journal(training: Training, settings: Settings, generator: random.Random) -> Counter:
    wait_for_step(training, 3)
    kill_all(training)
    journal = training.folder / JOURNAL_NAME
    content = journal.read_bytes()
    line_start = content.rstrip(b"\n").rfind(b"\n") + 1
    os.truncate(journal, generator.randint(line_start + 1, len(content) - 1))
    return play(training, [], lambda _: None, generator, LIMIT_S) + Counter(["torn line"])


def _lose_policy(training: Training, settings: Settings, generator: random.Random) -> Counter:
    wait_for_step(training, 3)
    kill_all(training)
    newest = max((training.folder / "policy").glob("v??????"))
    for shard in newest.glob("*.safetensors"):
        shard.unlink()
    return play(training, [], lambda _: None, generator, LIMIT_S) + Counter(["missing shard"])


def _lose_policy_of_running(training: Training, settings: Settings, generator: random.Random) -> Counter:
    """Only the server dies, while a trainer waits for its batch."""

    def strike(run: Training) -> int | None:
        pid = run.pid_of("server")
        run.server.stop()
        for shard in (run.folder / "policy").glob("v??????/*.safetensors"):
            shard.unlink()
        return pid

    return play(training, ["rollout", "judging"], strike, generator, LIMIT_S)


def _cut_checkpoint(training: Training, settings: Settings, generator: random.Random, pattern: str) -> Counter:
    checkpoint = training.folder / "checkpoints" / "checkpoint-4"
    wait_for(lambda: training.go_on() and checkpoint.is_dir(), "the checkpoint of step 4", LIMIT_S)
    kill_all(training)
    file = max(checkpoint.rglob(pattern), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    training.start_again()
    wait_for(lambda: training.trainer.poll() is not None, "the trainer's refusal", 200)
    output = training.trainer.last_lines(5)
    if training.trainer.poll() != 2 or str(file) not in output or "remove the checkpoint's folder" not in output:
        raise RuntimeError(f"a trainer on a cut {file.name} ended with status {training.trainer.poll()}: {output}")
    shutil.rmtree(checkpoint)
    return play(training, [], lambda _: None, generator, LIMIT_S) + Counter([f"cut {file.name}"])


def damage_cases(settings: Settings) -> list[Case]:
    """One for each kind of damage."""
    cases = [
        training_case("damage", "journal", _tear_journal),
        training_case("damage", "policy", _lose_policy),
        training_case("damage", "policy-of-running", _lose_policy_of_running),
    ]
    for name, pattern in _CHECKPOINT_FILES.items():
        cases.append(training_case("damage", f"checkpoint-{name}", partial(_cut_checkpoint, pattern=pattern)))
    return cases
