"""Where a training's processes load their models to, and in which type, so that a machine's memory never holds a whole
model for each of them: weights go to their device one by one as they are read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer import grpo_trainer


def weights_dtype(dtype: str, has_adapter: bool) -> str:
    """The type that weights are loaded in for an arithmetic of `train.dtype`.

    Weights under training are float32: a learning rate of 5e-7 is lost in bfloat16's rounding; bf16=True casts the
    arithmetic. DeepSpeed casts whatever it is given to `train.dtype` and makes its float32 masters of that, so float32
    would only take memory. Weights beside an adapter do not change; the adapter itself is float32 all the same, as PEFT
    has it.
    """
    with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    return dtype if has_adapter or with_deepspeed else "float32"


def device_for_weights() -> torch.device | None:
    """The device that this process loads models onto; None where they are loaded into the host's memory: that is the
    device itself on CPUs, and ZeRO-3 splits weights as it reads them."""
    device = PartialState().device
    return None if device.type == "cpu" or is_deepspeed_zero3_enabled() else device


@contextmanager
def models_go_to(device: torch.device | None) -> Iterator[None]:
    """Inside, TRL loads policy and reference onto `device`. By itself it loads both into the host's memory under
    DeepSpeed and where several processes train, in each of them at the same time."""
    load = grpo_trainer.create_model_from_path

    def load_there(name: str, **options: Any) -> PreTrainedModel:
        return load(name, **(options | {"device_map": {"": device}}))

    if device is not None:
        grpo_trainer.create_model_from_path = load_there
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = load
