"""How the processes of one training talk to each other."""

import os
from typing import Optional

import torch


def communication_backend() -> Optional[str]:
    """gloo where accelerate launched processes on CPUs; else (None) what the library chooses."""
    launched = "LOCAL_RANK" in os.environ
    return "gloo" if launched and not torch.cuda.is_available() else None


def keep_deepspeed_from_compiling() -> None:
    """On CPUs DeepSpeed compiles a shared-memory collective as it starts: a minute, and a C++ compiler that a laptop
    may not have. gloo does the same work; telling DeepSpeed that no kernel of its own can be built makes it use that.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # said, it need not be guessed with a warning
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}
