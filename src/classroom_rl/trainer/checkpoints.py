"""What resuming depends on: checkpoints that are complete or absent, and the run's id."""

import logging
import re
import shutil
import uuid
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from classroom_rl.models.checkpoint_safety import refuse_unsafe_checkpoint
from classroom_rl.models.policy_folder import complete, policies_folder, shared_memory_folder

logger = logging.getLogger(__name__)
UNFINISHED = "unfinished"
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")
"""What a request id, which begins with it, can hold. Earlier versions took the folder's name, which may not fit."""


def run_id_of(run_folder: Path) -> str:
    """The run's id, which is made at the first call and stays the same over restarts."""
    path = run_folder / "run_id"
    if not path.exists() or not _RUN_ID.fullmatch(path.read_text(encoding="utf-8")):
        path.write_text(f"run-{uuid.uuid4().hex[:12]}", encoding="utf-8")
    return path.read_text(encoding="utf-8")


def last_checkpoint(folder: Path) -> str | None:
    """The checkpoint to resume from; None if there is none.

    Raises:
        UnsafeCheckpoint: if it is damaged, or would run code when it is loaded.
    """
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    if last is not None:
        refuse_unsafe_checkpoint(Path(last))
    return last


def step_of(checkpoint: str | Path | None) -> int:
    """The number of optimizer steps before a checkpoint was saved; 0 for None."""
    return int(Path(checkpoint).name.rpartition("-")[2]) if checkpoint is not None else 0


def remove_unfinished(folder: Path) -> None:
    """Remove an unfinished checkpoint from `folder`, if there is one."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def remove_leftovers(run_folder: Path) -> None:
    """Remove what a trainer left in its run folder when it was killed or the disk was full: an unfinished checkpoint,
    unfinished policies and models, and its lease on the GPUs (server/engine_sleep.py), for which a server would wait
    if it cannot tell whether that trainer still runs.

    The caller must hold the trainer's claim on the folder, so that no other trainer uses it.
    """
    remove_unfinished(run_folder / "checkpoints")
    for folder in (run_folder, policies_folder(run_folder), shared_memory_folder(run_folder)):
        for unfinished in folder.glob("*.unfinished"):
            shutil.rmtree(unfinished, ignore_errors=True)
    for lease in run_folder.glob("gpu_lease*.json"):
        lease.unlink(missing_ok=True)


def complete_checkpoint(folder: Path, step: int, keep: int, best: int | None = None) -> None:
    """Move the checkpoint in `folder/unfinished` to its final name once it is on disk, and only then delete the oldest
    checkpoints, so that `keep` remain, and that of the step `best`."""
    name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
    complete(folder / UNFINISHED / name, folder / name)
    remove_unfinished(folder)
    checkpoints = sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=step_of)
    for path in checkpoints[:-keep]:
        if step_of(path) != best:
            shutil.rmtree(path)
