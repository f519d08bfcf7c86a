"""What makes a CPU train faster: its bfloat16 units, memory that is kept instead of being asked for again, and TRL's
log-probs in tiles that stay in the processor's cache."""

import ctypes

import torch
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
