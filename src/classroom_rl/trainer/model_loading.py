"""The device and dtype that training processes load their models with, and what makes a CPU train faster."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_NEVER, _TOP_PAD_BYTES = -1, 2**26
_TILE = (1024, 2048)
"""Tokens, and entries of the vocabulary, in one product: 8 MB of float32."""


def prepare_cpu(dtype: str) -> None:
    """Prepare this process for a training on the CPU; call it before a model is loaded.

    Args:
        dtype: that of the arithmetic. With `bfloat16`, float32 products are computed by the CPU's bfloat16 units, too,
            with operands rounded to bfloat16 and float32 sums; a CPU without such units computes them as before.
    """
    _keep_memory()
    _use_small_tiles()
    if dtype == "bfloat16":
        torch.set_float32_matmul_precision("medium")


def _keep_memory() -> None:
    """Have glibc keep large blocks when they are freed. Otherwise each large tensor is new memory, which the kernel
    fills with zeros page by page; that took up to a third of a training step's time. Another C library is left as it
    is."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _TOP_PAD_BYTES)):
            mallopt(option, value)


def _use_small_tiles() -> None:
    """Have TRL's log-probs take small tiles, and only the tokens that have a label. TRL takes 4,096 × 32,768 at a time,
    half a gigabyte that is read and written some ten times. It takes all tokens on other devices than GPUs, because
    shapes that change would cost some of them a compilation; CPUs compile nothing."""
    chunked_logprob.TOKEN_CHUNK_SIZE, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = _TILE
    trl_utils._use_triton = lambda _device: True  # in this module it decides about the tokens, and nothing else


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
