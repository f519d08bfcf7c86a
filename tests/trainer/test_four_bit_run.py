"""QLoRA in a whole run: a real engine, a real trainer with ZeRO-2, and the run resumed."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from classroom_rl.models.policy_folder import policy_path
from tests.conftest import running_server
from tests.trainer.test_lora_runs import differences, judged, with_adapter
from tests.trainer.test_several_processes import launch, metrics_of

pytestmark = pytest.mark.full  # a whole run of server and trainer, minutes
__all__ = ["judged"]  # a fixture


def test_the_engine_samples_from_the_rounded_weights_that_are_trained(
    world: Path, judged: list[str], tmp_path: Path
) -> None:
    lora = ["teacher_model.lora={enable: true, rank: 6, alpha: 24, dropout: 0}", "teacher_model.load_in_4bit=true"]
    training = ["train.learning_rate=5e-3", "train.per_device_train_batch_size=4", "logging.save_steps=1"]
    with running_server(world, tmp_path / "run", *judged, *lora) as server:
        for steps in (2, 3):  # the second launch resumes
            done = launch("1CPU", [*server.overrides, *training, f"train.max_steps={steps}"])
            assert done.returncode == 0, done.stderr[-4000:]
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["mismatch/mean_abs_logprob_diff"] < 0.002 for line in lines)
    (rounded,) = (tmp_path / "run").glob("base_4bit_*")
    adapter = policy_path(tmp_path / "run", 2)
    base = AutoModelForCausalLM.from_pretrained(rounded, dtype=torch.float32)
    agreeing = differences(PeftModel.from_pretrained(base, adapter).eval(), tmp_path / "run", 2)
    over_the_original = differences(with_adapter(world, adapter), tmp_path / "run", 2)
    assert agreeing.abs().max() < 0.02 and agreeing.abs().mean() < 0.002 < over_the_original.abs().mean()
    print(f"mean difference {agreeing.abs().mean():.2g}, over the original base {over_the_original.abs().mean():.2g}")
    merged = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert merged.keys() == load_file(rounded / "model.safetensors").keys()
