"""Optimizers on DeepSpeed: resuming from a checkpoint is exact, and the size of their states. bitsandbytes' paged
optimizers of GPUs run on CPUs without paging."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from classroom_rl.config.train_rl import TrainConfig
from classroom_rl.config.values import OPTIMIZERS
from classroom_rl.memory.budget import state_bytes
from tests.conftest import ROOT, free_port
from tests.memory.conftest import write_config


def test_the_default_is_one_that_the_full_tests_resume_and_the_known_name_stays() -> None:
    assert TrainConfig().optimizer == "adamw_bnb_8bit"
    assert "paged_adamw_8bit" in OPTIMIZERS


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_every_optimizer_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(stage: int, tmp_path: Path) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = write_config(tmp_path / "model", small | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    program = ["tests/support/deepspeed_resume.py", model, str(stage), str(tmp_path / "checkpoints"), *OPTIMIZERS]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.removeprefix("found ") for line in done.stdout.splitlines() if line.startswith("found ")]
    results = {result.pop("optimizer"): result for result in map(json.loads, lines)}
    assert set(results) == set(OPTIMIZERS)
    for name, result in results.items():
        assert result["apart"] == 0 and result["moved"] > 1e-4, name
        assert (result["apart without states"] > 1e-3) == (name != "sgd"), f"{name}: its states do not count"
        assert result["bytes per parameter"] == pytest.approx(state_bytes(name, stage), rel=0.02), name
