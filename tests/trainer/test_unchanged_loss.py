"""Without a supervisor, turn credit or corrections, the loss is that of before they were built: recorded at commit
051636e, with the same model and the same batch."""

import json
from pathlib import Path

import pytest
import torch

from classroom_rl.trainer import batch
from classroom_rl.trainer.batch import Batch
from tests.support.offline_trainer import offline_trainer, save_tiny_model

RECORDED = json.loads(Path(__file__).with_name("recorded_loss.json").read_text())
RECORDED_ON = "AVX2"
CASES = {
    "dapo": ["train.beta=0"],
    "dapo with a reference": ["train.beta=0.04"],
    "grpo": ["train.beta=0", "train.loss_type=grpo"],
    "dr_grpo unscaled": ["train.beta=0", "train.loss_type=dr_grpo", "train.scale_rewards=none"],
    "bnpo": ["train.beta=0", "train.loss_type=bnpo"],
    "cispo": ["train.beta=0", "train.loss_type=cispo"],
    "temperature 0.7": ["train.beta=0", "teacher_model.vllm.temperature=0.7"],
}


def in_trls_order(batch: Batch, max_rows: int, *_: object) -> list[list[int]]:
    """The micro-batches that were recorded, on which `bnpo` depends: TRL shuffled the rows of a batch."""
    torch.manual_seed(0)
    order = torch.randperm(len(batch.prompt_ids_BP)).tolist()
    return [order[start : start + max_rows] for start in range(0, len(order), max_rows)]


def measured(case: str, folder: Path, tokenizer_of: Path) -> dict[str, float]:
    """The loss of a batch, and for each parameter the norm of its gradient and the gradient along a fixed direction."""
    trainer = offline_trainer(folder / "run", save_tiny_model(folder / "model", tokenizer_of), CASES[case])
    loss, gradients = trainer.loss_and_gradients(trainer.batch())
    figures = {"loss": loss}
    for index, (name, gradient) in enumerate(sorted(gradients.items())):
        direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(index))
        figures[f"{name} norm"], figures[f"{name} along"] = gradient.norm().item(), (gradient * direction).sum().item()
    return figures


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_before(
    case: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-6 on the kind of CPU that they were recorded on; another one adds up in another order."""
    monkeypatch.setattr(batch, "micro_batches", in_trls_order)
    current = measured(case, tmp_path, world / "blank")
    assert current.keys() == RECORDED[case].keys()
    tolerance = 1e-6 if torch.backends.cpu.get_cpu_capability() == RECORDED_ON else 1e-4
    for name, value in current.items():
        assert value == pytest.approx(RECORDED[case][name], rel=tolerance, abs=tolerance), name
