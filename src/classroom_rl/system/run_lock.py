"""Locks a run folder, so that only one server and one trainer work in it at a time."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from classroom_rl.errors import ConfigError


def claim(program: str, run_folder: Path) -> TextIO:
    """Lock the run folder against other processes of the same program, as long as the returned file is open. The kernel
    closes the file when this process ends, even if it is killed.

    Raises:
        ConfigError: if another process holds the lock; the message names it.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    file = (run_folder / f"{program}.lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(
            f"Process {file.read()} works in {run_folder} as {program} already. End it first, or choose another folder "
            "with logging.save_dir=…"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def is_claimed(program: str, run_folder: Path) -> bool:
    """Whether a process of this program holds the lock of the run folder."""
    try:
        file = (run_folder / f"{program}.lock").open("r", encoding="utf-8")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two checks do not conflict
        except BlockingIOError:
            return True
    return False
