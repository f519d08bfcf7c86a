"""Communication between the processes of one training."""

import hashlib
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import wraps
from typing import Any, Optional

import torch

from classroom_rl.errors import ConfigError

_STORE_TIMEOUT = timedelta(seconds=10)


def communication_backend() -> Optional[str]:
    """The torch.distributed backend for processes that accelerate launched; None, the default, for a single process.

    On GPUs: NCCL for GPU tensors, and gloo for everything on the CPU (Python objects and barriers). accelerate's
    default under DeepSpeed is NCCL alone, which sends Python objects with GPU kernels. A process that waits for another
    one's conversations would then keep a GPU busy that an engine may need to sample them.
    """
    from accelerate.utils import parse_flag_from_env

    if "LOCAL_RANK" not in os.environ:
        return None
    on_cpus = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return "gloo" if on_cpus else "cuda:nccl,cpu:gloo"


def open_process_group_on_cpus(timeout_s: float) -> None:
    """Open the group of processes that were launched on CPUs, where transformers does not pass on its timeout: a
    process would wait torch's 30 minutes for another one. On GPUs it does, and for a single process nothing is done.

    Args:
        timeout_s: how long a collective operation may take.
    """
    if communication_backend() == "gloo" and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def keep_deepspeed_from_compiling() -> None:
    """Make DeepSpeed use gloo on CPUs.

    By default it compiles its own shared-memory collective at startup, which takes a minute and needs a C++ compiler
    that a laptop may not have. If none of its kernels counts as buildable, it uses gloo.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed guesses it and logs a warning
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}


def uses_fsdp(environment: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` was configured for FSDP, according to the environment variables that it sets."""
    return environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_fsdp(environment: Mapping[str, str], has_second_model: bool) -> None:
    """Refuse FSDP settings of accelerate under which the training would give other results than without FSDP.

    Args:
        has_second_model: whether a reference model or a strong tutor is loaded in addition to the trained one.

    Raises:
        ConfigError: names the setting and a value that works.
    """
    if not uses_fsdp(environment):
        return
    if environment.get("FSDP_VERSION", "1") != "2":
        raise ConfigError("accelerate is set to FSDP1, which is not supported: set fsdp_version: 2, as in config/fsdp.")
    if environment.get("FSDP_STATE_DICT_TYPE") != "FULL_STATE_DICT":
        raise ConfigError(
            f"fsdp_state_dict_type is {environment.get('FSDP_STATE_DICT_TYPE')}, but checkpoints of that type are "
            "pickles that torch loads without restrictions: set fsdp_state_dict_type: FULL_STATE_DICT, as in "
            "config/fsdp."
        )
    if environment.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") == "true" and has_second_model:
        raise ConfigError(
            "fsdp_cpu_ram_efficient_loading is true, but TRL gives the weights of a second model to the first process "
            "alone then: set it to false, or load none: no train.distillation.model, and no reference (train.beta=0, "
            "not with online_dpo, or an adapter, whose reference is the model without it)."
        )


def let_fsdp_run_on_cpus() -> None:
    """Make accelerate apply its FSDP settings on CPUs, too. Call it before the first `Accelerator` is created.

    accelerate silently ignores them on CPUs and would train with DDP, although torch itself can run FSDP2 over gloo.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    if torch.cuda.is_available() or not uses_fsdp(os.environ):
        return
    original_init = AcceleratorState.__init__

    @wraps(original_init)
    def init_with_fsdp(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.fsdp_plugin = fsdp_plugin
        # Each __init__ resets `distributed_type` in the state that all instances share, also a call without plugin.
        if getattr(self, "fsdp_plugin", None) is not None:
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = init_with_fsdp


def is_first_to_say(message: str) -> bool:
    """Whether this process is the first one of the training on this machine that calls this with this message.

    So an error that ends all processes is shown once, and an error in a single process is always shown. The processes
    coordinate through the launcher's TCP store, because the process group may not exist yet, or not any more.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore

    key = f"{os.environ['GROUP_RANK']}/{hashlib.sha256(message.encode()).hexdigest()}"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT).add(key, 1) == 1
    except (DistNetworkError, DistStoreError):
        return True  # the store is gone: better to show the error twice than never


def gpu_id(device: torch.device) -> Optional[str]:
    """The GPU's UUID, the same in every process and unique among all machines; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
