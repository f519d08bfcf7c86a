"""The device and dtype that training processes load their models with. Weights go to the device one by one as they are
read, so that the host's memory does not hold a whole model per process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.integrations import is_deepspeed_zero3_enabled


def weights_dtype(dtype: str, has_adapter: bool) -> str:
    """The dtype to load weights in, for arithmetic in `train.dtype`.

    Trained weights are float32, because bfloat16 rounds away the updates of a learning rate of 5e-7; bf16=True casts
    the arithmetic. DeepSpeed casts all weights to `train.dtype` and makes its float32 master weights from these, so
    float32 would only take memory. Weights under an adapter do not change; PEFT keeps the adapter itself in float32.
    """
    with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    return dtype if has_adapter or with_deepspeed else "float32"


def device_for_weights() -> torch.device | None:
    """The device that this process loads models onto; None for the host's memory: on CPUs that is the device itself,
    ZeRO-3 partitions weights as it reads them, and FSDP's efficient loading takes them from the first process's host
    memory."""
    device = PartialState().device
    on_host = device.type == "cpu" or is_deepspeed_zero3_enabled() or is_fsdp_enabled()
    return None if on_host else device


@contextmanager
def models_go_to(device: torch.device | None) -> Iterator[None]:
    """Inside, TRL loads policy and reference model onto `device`. TRL alone would load both into the host's memory,
    with DeepSpeed and with several processes, in all processes at the same time."""
    from trl.trainer import grpo_trainer  # which imports vLLM, and a fine-tuning needs neither

    load = grpo_trainer.create_model_from_path

    def load_there(name: str, **options: Any) -> PreTrainedModel:
        return load(name, **(options | {"device_map": {"": device}}))

    if device is not None:
        grpo_trainer.create_model_from_path = load_there
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = load
