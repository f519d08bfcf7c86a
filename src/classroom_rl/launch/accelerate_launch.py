"""Runs `accelerate launch` in such a way that the trainer's error message is the last text on the terminal.

    python -m classroom_rl.launch.accelerate_launch --config_file config/deepspeed/zero3_4GPU.yaml \\
        train_rl.py --config-name …

It takes accelerate's arguments and returns the exit status of the process that failed first. accelerate itself would
return 1 and print two pages of internal details after the trainer's message.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import torch


def main(arguments: Sequence[str]) -> int:
    """Launch the training. Returns the exit status: 128 + signal number if a signal ended the launch or one of its
    processes."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects the device and logs a warning
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except SignalException as interruption:
        return 128 + interruption.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _status(failure.exitcode, f"process {rank} of the training (pid {failure.pid})")
    except subprocess.CalledProcessError as error:  # accelerate's error for a training in one process
        return _status(error.returncode, "the training")
    return 0


def _status(exit_code: int, process: str) -> int:
    """The exit status for a process that failed. If a signal ended it, it could not print a message itself, so this
    function prints one."""
    if exit_code >= 0:
        return exit_code
    name = signal.Signals(-exit_code).name
    hint = " The system does that when memory runs out." if name == "SIGKILL" else ""
    print(f"error: {process} was ended by {name}.{hint}", file=sys.stderr)
    return 128 - exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
