"""What a resumed run depends on: checkpoints that are whole or not there, and an order of problems that follows from the
step alone."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
from trl.trainer.utils import RepeatSampler

from src.models.checkpoint_safety import refuse_unsafe_checkpoint
from src.models.policy_folder import complete, policies_folder

logger = logging.getLogger(__name__)
UNFINISHED = "unfinished"


def last_checkpoint(folder: Path) -> str | None:
    """The checkpoint to go on from; None if there is none.

    Raises:
        UnsafeCheckpoint: if it is damaged, or would run code when it is loaded.
    """
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    if last is not None:
        refuse_unsafe_checkpoint(Path(last))
    return last


def step_of(checkpoint: str | Path | None) -> int:
    """After how many optimizer steps a checkpoint was made; 0 if there is none."""
    return int(Path(checkpoint).name.rpartition("-")[2]) if checkpoint is not None else 0


def remove_unfinished(folder: Path) -> None:
    """Remove the checkpoint that was begun in `folder` and not completed, if there is one."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def remove_leftovers(run_folder: Path) -> None:
    """Remove what a trainer that was killed, or met a full disk, left in its run folder: a checkpoint, policies and
    models that it had begun to write, and its lease on the GPUs (src/server/gpu_lease.py), which a server would otherwise wait
    for if it cannot tell whether that trainer lives. Only for who has the trainer's claim on the folder: then no other
    trainer lives there."""
    remove_unfinished(run_folder / "checkpoints")
    for begun in (*run_folder.glob("*.unfinished"), *policies_folder(run_folder).glob("*.unfinished")):
        shutil.rmtree(begun, ignore_errors=True)
    for lease in run_folder.glob("gpu_lease*.json"):
        lease.unlink(missing_ok=True)


def complete_checkpoint(folder: Path, step: int, keep: int) -> None:
    """Give the checkpoint in `folder/unfinished` its name once it is on disk, and only then delete the oldest, so that
    `keep` are left."""
    name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
    complete(folder / UNFINISHED / name, folder / name)
    remove_unfinished(folder)
    older = sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=step_of)
    for path in older[:-keep]:
        shutil.rmtree(path)


class EpochOrderSampler(Sampler):
    """TRL's sampler with an order that the epoch fixes: TRL's own draws the orders one after the other, so a run that
    is resumed in its second epoch would see the first one's again.

    Args:
        epoch: tells the epoch that begins, from 0.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self._sampler = sampler
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self._sampler.generator.manual_seed(self._sampler.seed + 1_000_003 * self._epoch())
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)
