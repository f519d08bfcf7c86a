"""How the processes of one training talk to each other."""

import hashlib
import os
from datetime import timedelta
from typing import Optional

import torch

_ANSWERS_WITHIN = timedelta(seconds=10)


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


def is_first_to_say(message: str) -> bool:
    """Whether no other process of this training on this machine asked the same about this message before.

    An error that ends all of them is then shown once, and one that only one of them met is shown, too, whichever it
    is. The processes may not have met yet, or no more: what they ask is the store of the launcher that started them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore

    said = f"{os.environ['GROUP_RANK']}/{hashlib.sha256(message.encode()).hexdigest()}"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(address, port, is_master=False, timeout=_ANSWERS_WITHIN).add(said, 1) == 1
    except (DistNetworkError, DistStoreError):
        return True  # rather twice than never
