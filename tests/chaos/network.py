"""The network between trainer and server is cut, and comes back: two network namespaces of the test's own, joined by a
cable (a pair of virtual interfaces)."""

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.cases import Case, LeftOut, Settings
from tests.chaos.trainings import LIMIT_S, Disturb, Training, training_case
from tests.support.kills import play

_SHORT_S = 10.0
_CUT_IN = ("publish", "rollout", "judging", "optimizer step")
SERVER, TRAINER = "chaos-server", "chaos-trainer"
"""The namespaces."""
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def _ip(*arguments: str) -> None:
    """Raises LeftOut where it is not allowed."""
    try:
        result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LeftOut("there is no `ip` here: install Debian's iproute2") from None
    if result.returncode:
        raise LeftOut(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


@contextmanager
def two_machines(_: Path | None = None, names: Sequence[str] = (SERVER, TRAINER)) -> Iterator[None]:
    """Two namespaces of these names, with the addresses in ADDRESSES, and the cable.

    Raises:
        LeftOut: where they cannot be made.
    """
    created = []
    try:
        for name in names:
            _ip("netns", "add", name)
            created.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield
    finally:
        for name in created:
            subprocess.run(["ip", "netns", "del", name], check=True)


def cut(seconds: float) -> None:
    """Cut the cable for this long."""
    _ip("-n", SERVER, "link", "set", "cable", "down")
    time.sleep(seconds)
    _ip("-n", SERVER, "link", "set", "cable", "up")


def _cuts(long: bool) -> Disturb:
    def disturb(training: Training, settings: Settings, generator: random.Random) -> Counter:
        def strike(run: Training) -> int:
            cut(settings.stopped_s if long else _SHORT_S)
            return os.getpid()

        return play(training, _CUT_IN[1:3] if long else _CUT_IN, strike, generator, LIMIT_S)

    return disturb


def cases(settings: Settings) -> list[Case]:
    """Short cuts in four phases, and long ones in two; the latter outlast the client's patience with a request."""
    inside = {"the server": SERVER, "the provider": SERVER, "the trainer": TRAINER}
    options = {"around": two_machines, "inside": inside, "more": [f"generation.server_host={ADDRESSES[0]}"]}
    return [training_case("network", name, _cuts(name == "long"), **options) for name in ("short", "long")]
