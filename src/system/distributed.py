"""Communication between the processes of one training."""

import hashlib
import os
from datetime import timedelta
from typing import Optional

import torch

_STORE_TIMEOUT = timedelta(seconds=10)


def communication_backend() -> Optional[str]:
    """The torch.distributed backend: "gloo" if accelerate launched the processes on CPUs, else None, the default."""
    launched = "LOCAL_RANK" in os.environ
    return "gloo" if launched and not torch.cuda.is_available() else None


def keep_deepspeed_from_compiling() -> None:
    """Make DeepSpeed use gloo on CPUs.

    Otherwise it compiles its own shared-memory collective when it starts, which takes a minute and a C++ compiler that
    a laptop may not have. It uses gloo if it is told that none of its kernels can be built.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed guesses it and logs a warning
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}


def is_first_to_say(message: str) -> bool:
    """Whether this process is the first of the training, on this machine, to ask about this message.

    So an error that ends all processes is shown once, and an error in a single process is shown whichever process it
    is. The answer comes from the launcher's TCP store, since the process group may not exist yet, or no longer.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore

    said = f"{os.environ['GROUP_RANK']}/{hashlib.sha256(message.encode()).hexdigest()}"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT).add(said, 1) == 1
    except (DistNetworkError, DistStoreError):
        return True  # the store is gone: better to show the error twice than never
