"""Runs `accelerate launch` so that the trainer's own error message is the last text on the terminal.

    python -m src.launch.accelerate_launch --config_file config/deepspeed/zero3_4GPU.yaml train_rl.py --config-name …

It takes accelerate's arguments and returns the exit status of the process that failed first. accelerate itself would
return 1 and print two pages about its internals after the trainer's message.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch


def main(arguments: Sequence[str]) -> int:
    """Launch; returns the exit status: 128 + signal number if a signal ended the launch or one of its processes."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed detects it and warns
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
        if failure.exitcode >= 0:
            return failure.exitcode  # the process has printed a message or a traceback
        name = signal.Signals(-failure.exitcode).name
        hint = " The system does that when memory runs out." if name == "SIGKILL" else ""
        print(f"error: process {rank} of the training (pid {failure.pid}) was ended by {name}.{hint}", file=sys.stderr)
        return 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
