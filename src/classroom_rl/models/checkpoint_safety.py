"""Checks a checkpoint before a training resumes from it. Optimizer states are pickles, and DeepSpeed loads them without
restrictions, so they could run any code. Truncated files are also found here, before any model is loaded."""

import json
from importlib import import_module
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from transformers.trainer import TRAINING_ARGS_NAME

from classroom_rl.errors import UnsafeCheckpoint

_PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
_TAG_FILE = "latest"
_DTYPE_CLASS = "numpy.dtypes.UInt32DType"  # not named in the pickle, but created when numpy.dtype is unpickled
ALLOWED = frozenset(
    {
        # numpy's random state in rng_state*.pth
        "numpy._core.multiarray._reconstruct",
        "numpy.dtype",
        "numpy.ndarray",
        # DeepSpeed's ZeRO-2 and ZeRO-3 optimizer states
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
"""The globals (classes and functions) in checkpoints of transformers and DeepSpeed, apart from tensors. All of them
hold only numbers."""


def refuse_unsafe_checkpoint(folder: Path) -> None:
    """Read every pickle of a checkpoint with torch's restricted unpickler, its JSON files, and the headers of its
    safetensors files, which contain the length of each file. Tensors are not read from disk.

    The `training_args.bin` of transformers is skipped, because nothing loads it.

    Raises:
        UnsafeCheckpoint: for a pickle that would call anything but `ALLOWED` (the message names the file and the call),
            a damaged file, a link, and a DeepSpeed tag that names no folder in the checkpoint.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise UnsafeCheckpoint(f"{path} is a link: what it leads to was not written with this checkpoint. {_FIX}")
        if path.is_file() and path.suffix in _PICKLE_SUFFIXES and path.name != TRAINING_ARGS_NAME:
            _refuse_unsafe_file(path)
        elif path.is_file() and path.suffix in (".json", ".safetensors"):
            _refuse_damaged_file(path)
    tag = folder / _TAG_FILE
    if tag.is_file():
        name = tag.read_text(encoding="utf-8", errors="replace").strip()
        if name not in {path.name for path in folder.iterdir() if path.is_dir()}:
            raise UnsafeCheckpoint(f"{tag} names {name[:100]!r}, which is no folder in {folder}. {_FIX}")


_FIX = "It was damaged or altered: remove the checkpoint's folder, and the training goes on from the one before it."


def _refuse_unsafe_file(path: Path) -> None:
    try:
        global_names = set(get_unsafe_globals_in_checkpoint(str(path)))
        disallowed = sorted(global_names - ALLOWED)
        if disallowed:
            raise UnsafeCheckpoint(
                f"{path} would call {', '.join(disallowed)} when it is loaded; a checkpoint of this project calls "
                f"nothing of that kind. {_FIX}"
            )
        with safe_globals([_global(name) for name in global_names | {_DTYPE_CLASS}]):
            torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except UnsafeCheckpoint:
        raise
    except Exception as error:  # an altered file can make an unpickler raise anything
        text = str(error).rpartition("WeightsUnpickler error:")[2].strip()  # without torch's advice to trust the file
        reason = text.splitlines()[0].split(". ")[0] if text else type(error).__name__
        raise UnsafeCheckpoint(f"{path} cannot be read as a checkpoint: {reason}. {_FIX}") from error


def _refuse_damaged_file(path: Path) -> None:
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        else:
            with safe_open(path, framework="pt"):
                pass
    except (SafetensorError, ValueError) as error:
        raise UnsafeCheckpoint(f"{path} cannot be read as a checkpoint: {error}. {_FIX}") from error


def _global(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)
