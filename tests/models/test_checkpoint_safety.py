"""Checkpoints are pickles: those that this project writes load, and any that would call a function is refused.
So is one with a damaged file."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import save_file

from classroom_rl.errors import UnsafeCheckpoint
from classroom_rl.models.checkpoint_safety import refuse_unsafe_checkpoint
from classroom_rl.trainer.checkpoints import last_checkpoint


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


PATCHES_A_CLASS = b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n}q\x00X\x01\x00\x00\x00aK\x01sb."
"""A pickle that sets an attribute on a class that checkpoints may name."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with what transformers and DeepSpeed write in theirs."""
    folder = tmp_path / "checkpoints" / "checkpoint-3"
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    state = {
        "optimizer_state_dict": {
            "loss_scaler": LossScaler(1.0),
            "dynamic": DynamicLossScaler(2**16, 2.0, 1000, 1.0, 1, False),
            "zero_stage": ZeroStageEnum.gradients,
            "param_slice_mappings": [{"weight": fragment_address(numel=4, start=0)}],
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(4)}}},
        }
    }
    torch.save(state, folder / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"module": {"weight": torch.ones(2, 2)}}, folder / "global_step3" / "mp_rank_00_model_states.pt")
    torch.save({"numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    (folder / "training_args.bin").write_bytes(b"read by nobody")
    save_file({"weight": torch.ones(8, 8)}, folder / "model.safetensors")
    state = {"global_step": 3, "log_history": [{"reward": float("nan")}]}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_what_deepspeed_and_transformers_write_is_taken_up(checkpoint: Path) -> None:
    refuse_unsafe_checkpoint(checkpoint)
    assert last_checkpoint(checkpoint.parent) == str(checkpoint)


@pytest.mark.parametrize(
    "name", ["global_step3/mp_rank_00_model_states.pt", "optimizer.pt", "deep/er/states.pth", "a.bin"]
)
def test_a_checkpoint_that_would_call_something_is_refused_and_nothing_called(checkpoint: Path, name: str) -> None:
    mark = checkpoint.parent / "it ran"
    (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"step": 3, "extra": [Runs(mark)]}, checkpoint / name)
    with pytest.raises(UnsafeCheckpoint, match=rf"{Path(name).name} would call posix\.mkdir when it is loaded"):
        last_checkpoint(checkpoint.parent)
    assert not mark.exists()


def with_pickle(path: Path, data: bytes) -> None:
    """A torch archive with this pickle in it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def as_plain_pickle(path: Path) -> None:
    torch.save({"extra": Runs(path.parent / "it ran")}, path, _use_new_zipfile_serialization=False)


def as_script(path: Path) -> None:
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(path))


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        as_plain_pickle,
        as_script,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"cposix\nmkdir\n(S'x'\ntR."),
        lambda path: with_pickle(path, PATCHES_A_CLASS),
    ],
    ids=["cut", "plain pickle", "script", "empty", "opcodes", "patches"],
)
def test_what_is_no_checkpoint_of_torch_is_refused(checkpoint: Path, damage: Callable[[Path], None]) -> None:
    damage(checkpoint / "scheduler.pt")
    with pytest.raises(UnsafeCheckpoint, match=r"scheduler\.pt .*remove the checkpoint's folder"):
        refuse_unsafe_checkpoint(checkpoint)
    assert not (checkpoint / "it ran").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
def test_weights_or_a_state_that_were_cut_are_refused_by_name(checkpoint: Path, name: str, kept: float) -> None:
    file = checkpoint / name
    os.truncate(file, int(file.stat().st_size * kept))
    with pytest.raises(UnsafeCheckpoint, match=rf"{name} cannot be read .*remove the checkpoint's folder"):
        last_checkpoint(checkpoint.parent)
    shutil.rmtree(checkpoint)
    assert last_checkpoint(checkpoint.parent) is None


@pytest.mark.parametrize("tag", ["../../elsewhere", "/tmp", "global_step9", ""])
def test_a_tag_that_leads_out_of_the_folder_is_refused(checkpoint: Path, tag: str) -> None:
    (checkpoint / "latest").write_text(tag)
    with pytest.raises(UnsafeCheckpoint, match="latest names .* which is no folder in"):
        refuse_unsafe_checkpoint(checkpoint)


def test_links_are_refused(checkpoint: Path) -> None:
    target = shutil.move(checkpoint / "global_step3", checkpoint.parent / "elsewhere")
    (checkpoint / "global_step3").symlink_to(target)
    with pytest.raises(UnsafeCheckpoint, match="global_step3 is a link"):
        refuse_unsafe_checkpoint(checkpoint)
