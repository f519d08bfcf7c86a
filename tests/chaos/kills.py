"""kill -9 of trainer, server, engine, launcher and provider, at random moments of each phase; and SIGSTOP."""

import random
import time
from collections import Counter
from functools import partial
from itertools import product

import psutil

from classroom_rl.config.values import MEMORY, NCCL
from tests.chaos.cases import Case, Settings
from tests.chaos.trainings import LIMIT_S, Disturb, Training, phases_in_turn, training_case
from tests.support.kills import kill, killing, play

TARGETS = ("trainer", "server", "engine", "launcher", "provider")
_KILLS_PER_RUN = 6
_WITH_REAL_ENGINES = 2
_WHILE_PUBLISHING, _TO_WRITE_S = 5, 0.01
"""Kills while weights are published without the disk, and about the seconds that this takes."""
_STOPS = {
    "trainer": ("publish", "optimizer step"),
    "server": ("rollout", "judging"),
    "provider": ("review", "judging"),
}
"""By program: the phases in which it is stopped."""


def _kills(target: str, count: int, first: int) -> Disturb:
    def disturb(training: Training, settings: Settings, generator: random.Random) -> Counter:
        return play(training, phases_in_turn(count, first), killing(target), generator, LIMIT_S)

    return disturb


def _kills_while_publishing(target: str) -> Disturb:
    def disturb(training: Training, settings: Settings, generator: random.Random) -> Counter:
        training.longest_delay_s = _TO_WRITE_S
        phases = ["publish"] * min(_WHILE_PUBLISHING, settings.kills)
        return play(training, phases, killing(target), generator, LIMIT_S)

    return disturb


def kill_cases(settings: Settings) -> list[Case]:
    """For each program: kills spread over trainings with scripted engines, and two with real ones. Trainer and server
    also while weights are published without the disk."""
    cases = []
    real_kills = min(_WITH_REAL_ENGINES, settings.kills)
    for target in TARGETS:
        options = {"launched": target == "launcher"}
        remaining, number = settings.kills - real_kills, 1
        while remaining > 0:
            count = min(_KILLS_PER_RUN, remaining)
            disturb = _kills(target, count, 0)
            cases.append(training_case("kill", f"{target}-{number}", disturb, **options))
            remaining, number = remaining - count, number + 1
        if real_kills:
            disturb = _kills(target, real_kills, TARGETS.index(target))
            cases.append(training_case("kill", f"{target}-real", disturb, engines="real", **options))
    for target, transport in product(("trainer", "server"), (MEMORY, NCCL)):
        overrides = [f"train.publish_through={transport}"]
        cases.append(training_case("kill", f"{target}-{transport}", _kills_while_publishing(target), more=overrides))
    return cases


def _stop(training: Training, target: str, seconds: float) -> int | None:
    """SIGSTOP, and SIGCONT after this many seconds."""
    pid = training.pid_of(target)
    if pid is not None:
        process = psutil.Process(pid)
        process.suspend()
        time.sleep(seconds)
        process.resume()
    return pid


def stop_cases(settings: Settings) -> list[Case]:
    """Trainer, server and provider stand still, twice each."""

    def stops(target: str) -> Disturb:
        def disturb(training: Training, own: Settings, generator: random.Random) -> Counter:
            strike = partial(_stop, target=target, seconds=own.stopped_s)
            return play(training, _STOPS[target], strike, generator, LIMIT_S)

        return disturb

    return [training_case("stop", target, stops(target)) for target in _STOPS]


def kill_all(training: Training) -> None:
    """Kill server and trainer at once."""
    for target in ("server", "trainer"):
        pid = training.pid_of(target)
        if pid is not None:
            kill(pid)
    training.server.stop()
    training.trainer.stop()
