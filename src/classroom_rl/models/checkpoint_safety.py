"""Checks a checkpoint before a training resumes from it: optimizer states are pickles, and DeepSpeed loads them without
restrictions, so they could run any code. A file that was cut is found here, too, before any model is loaded."""

import json
from importlib import import_module
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from transformers.trainer import TRAINING_ARGS_NAME

from classroom_rl.errors import UnsafeCheckpoint

_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
_TAG_FILE = "latest"
_MADE_BY_DTYPE = "numpy.dtypes.UInt32DType"  # no file names it: unpickling numpy.dtype makes one
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
"""The globals in checkpoints of transformers and DeepSpeed, besides tensors. All of them only hold numbers."""


def refuse_unsafe_checkpoint(folder: Path) -> None:
    """Read every pickle of a checkpoint with torch's restricted unpickler, its JSON files, and the headers of its
    safetensors files, which say how long each file is; tensors stay on disk.

    The `training_args.bin` of transformers is skipped: nothing loads it.

    Raises:
        UnsafeCheckpoint: for a pickle that would call anything but `ALLOWED` (with the file and the call), a damaged
            file, a link, and a DeepSpeed tag that names no folder in the checkpoint.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise UnsafeCheckpoint(f"{path} is a link: what it leads to was not written with this checkpoint. {_FIX}")
        if path.is_file() and path.suffix in _PICKLES and path.name != TRAINING_ARGS_NAME:
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
        found = set(get_unsafe_globals_in_checkpoint(str(path)))
        strange = sorted(found - ALLOWED)
        if strange:
            raise UnsafeCheckpoint(
                f"{path} would call {', '.join(strange)} when it is loaded; a checkpoint of this project calls nothing "
                f"of that kind. {_FIX}"
            )
        with safe_globals([_global(name) for name in found | {_MADE_BY_DTYPE}]):
            torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except UnsafeCheckpoint:
        raise
    except Exception as error:  # an altered file can make an unpickler raise anything
        said = str(error).rpartition("WeightsUnpickler error:")[2].strip()  # without torch's advice to trust the file
        reason = said.splitlines()[0].split(". ")[0] if said else type(error).__name__
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
