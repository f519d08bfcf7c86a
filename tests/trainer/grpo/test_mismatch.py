"""The mismatch of engine and trainer: measured and corrected in the loss, as if the old log-probs had been computed."""

from pathlib import Path

import pytest
import torch

from classroom_rl.trainer.grpo.mismatch import BatchMismatch, importance_ratio
from tests.support.offline_trainer import offline_trainer, save_tiny_model

FIGURES = ("sampling/", "mismatch/")


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("mismatch") / "model", world / "blank")


def trained_twice(folder: Path, model: Path, overrides: list[str]) -> list[tuple[float, dict, dict, int]]:
    """Loss, gradients, figures and forward passes of a batch, without old log-probs and with them."""
    found = []
    for needed in (False, True):
        trainer = offline_trainer(folder / str(needed), model, overrides)
        trainer.needs_old_log_probs = needed
        passes: list[int] = []
        trainer.model.register_forward_hook(lambda *_, own=passes: own.append(1))
        loss, gradients = trainer.loss_and_gradients(trainer.batch())
        metrics = trainer._metrics["train"]
        figures = {name: metrics[name][-1] for name in metrics if name.startswith(FIGURES)}
        found.append((loss, gradients, figures, len(passes)))
    return found


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("corrected", ["true", "false"])
def test_one_forward_pass_gives_the_same_loss_gradient_and_figures(
    mode: str, corrected: str, model: Path, tmp_path: Path
) -> None:
    overrides = [
        f"train.importance_sampling_mode={mode}",
        "train.importance_sampling_clip_max=1.1",
        f"train.importance_sampling_correction={corrected}",
        "train.per_device_train_batch_size=2",
    ]
    (loss, gradients, figures, passes), (old_loss, old_gradients, old_figures, old_passes) = trained_twice(
        tmp_path, model, overrides
    )
    assert passes < old_passes
    assert loss == pytest.approx(old_loss, abs=1e-6)
    largest = max(each.abs().max() for each in old_gradients.values())
    assert largest > 1e-6
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, old_gradients[name], rtol=0, atol=1e-4 * largest), name
    assert figures.keys() == old_figures.keys() and len(figures) == 7
    assert figures == pytest.approx(old_figures, abs=1e-5)
    assert figures["mismatch/mean_abs_logprob_diff"] > 0.01


@pytest.mark.parametrize("overrides", [["train.mu=2"], ["teacher_model.lora={enable: true, dropout: 0.1}"]])
def test_old_log_probs_are_computed_where_the_loss_has_others(
    overrides: list[str], model: Path, tmp_path: Path
) -> None:
    trainer = offline_trainer(tmp_path, model, overrides)
    assert all("old_per_token_logps" in each for each in trainer.batch())


def test_ratios_by_hand() -> None:
    trained, mask = torch.log(torch.tensor([[0.5, 0.4, 0.9]])), torch.tensor([[1, 1, 0]])
    sampled = torch.log(torch.tensor([[0.25, 0.8, 0.1]]))

    def ratio(mode: str, most: float) -> list[float]:
        return importance_ratio(trained, sampled, mask, mode, most).flatten().tolist()

    assert ratio("token_truncate", 1.5) == pytest.approx([1.5, 0.5, 1.0])
    assert ratio("token_mask", 1.5) == pytest.approx([0.0, 0.5, 1.0])
    assert ratio("sequence_truncate", 0.9) == pytest.approx([0.9])
    assert ratio("sequence_mask", 0.9) == pytest.approx([0.0])
    assert importance_ratio(trained, sampled * torch.nan, mask, "token_mask", 1.5).tolist() == [[1.0, 1.0, 1.0]]


def test_figures_count_tokens_however_they_are_divided_and_leave_out_unknown_ones() -> None:
    mismatch = BatchMismatch()
    for trained, sampled in (([[-1.0, -1.0]], [[-1.1, float("nan")]]), ([[-1.0, -2.0]], [[-1.3, -1.8]])):
        rows, mask = (torch.tensor(trained), torch.tensor(sampled)), torch.ones(1, 2)
        mismatch.add(*rows, mask, importance_ratio(*rows, mask, "token_truncate", 2.0))
    figures = mismatch.figures(lambda tensor: tensor)
    assert figures["mismatch/mean_abs_logprob_diff"] == pytest.approx(0.2)
    assert figures["sampling/sampling_logp_difference/max"] == pytest.approx(0.3)
    assert figures["sampling/importance_sampling_ratio/min"] == pytest.approx(0.818731, abs=1e-6)
