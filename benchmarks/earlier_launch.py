"""Server and trainer with ways of earlier trainers of this family switched on, in one command:

    python -m benchmarks.earlier_launch lockstep+text --config-name quickstart [overrides]

    lockstep       each message waits for the slowest conversation, and judges and rewards for the last message of all
    no_cache       the engines keep no prefixes: each message's whole prompt is computed anew
    restart        the teacher's engine is ended and started with the new weights at each publish
    restart_all    so are all engines
    text           the trainer asks for each reward by HTTP after the batch, and names conversations by their text
    sleeps         each process sleeps for fixed times around each batch

What each does stands in `earlier_server.py` and `earlier_trainer.py`; `none` switches none on. Server and trainer are
otherwise this project's, and no configuration can switch these ways on.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.launch.cli import launch
from classroom_rl.launch.commands import with_accelerate_config, with_precision
from classroom_rl.system.processes import Signals

LOCKSTEP, NO_CACHE, RESTART, RESTART_ALL = "lockstep", "no_cache", "restart", "restart_all"
TEXT, SLEEPS, NONE = "text", "sleeps", "none"
WAYS = (LOCKSTEP, NO_CACHE, RESTART, RESTART_ALL, TEXT, SLEEPS)


def ways_of(text: str) -> frozenset[str]:
    """The ways in a text such as `lockstep+text`."""
    ways = frozenset(text.split("+")) - {NONE}
    if unknown := sorted(ways.difference(WAYS)):
        sys.exit(f"there is no way {', '.join(unknown)}; there are {', '.join(WAYS)}, and {NONE}")
    return ways


def take_ways() -> frozenset[str]:
    """Take the ways, its first argument, off this program's command line."""
    return ways_of(sys.argv.pop(1))


def server_command(ways: str, overrides: Sequence[str]) -> list[str]:
    """The command of the server."""
    return [sys.executable, "-m", "benchmarks.earlier_server", ways, *overrides]


def trainer_command(ways: str, overrides: Sequence[str], dtype: str) -> list[str]:
    """The command of the trainer, under accelerate."""
    flags = with_precision(with_accelerate_config([]), dtype)
    launched = [sys.executable, "-m", "classroom_rl.launch.accelerate_launch", *flags, "--module"]
    return [*launched, "benchmarks.earlier_trainer", ways, *overrides]


def main() -> int:
    """Run both; returns the trainer's exit status."""
    ways, overrides = sys.argv[1], sys.argv[2:]
    ways_of(ways)
    config = load(TrainRLConfig, "train_rl", overrides, check_train_rl)
    Path(config.logging.save_dir).mkdir(parents=True, exist_ok=True)
    trainer = trainer_command(ways, overrides, config.train.dtype)
    with Signals() as signals:
        return launch(config, server_command(ways, overrides), trainer, "0", signals)


if __name__ == "__main__":
    sys.exit(main())
