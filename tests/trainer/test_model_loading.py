"""The trained model is loaded as the configuration says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from classroom_rl.errors import ConfigError
from classroom_rl.trainer import arguments, loop, model_loading
from classroom_rl.trainer.arguments import training_arguments
from classroom_rl.trainer.model_loading import load_policy
from tests.support.configs import training
from tests.support.offline_trainer import offline_trainer, save_tiny_model


@pytest.mark.parametrize(("wanted", "loaded"), [("eager", "eager"), ("sdpa", "sdpa"), ("null", "sdpa")])
def test_attention_is_computed_as_configured(tiny_model: Path, tmp_path: Path, wanted: str, loaded: str) -> None:
    config = training(f"teacher_model.model_name_or_path={tiny_model}", f"train.attn_implementation={wanted}")
    policy = load_policy(config, training_arguments(config, tmp_path))
    assert policy.model.config._attn_implementation == loaded


@pytest.mark.parametrize("name", ["flash_attention_2", "no_such_attention"])
def test_attention_that_is_not_there_is_refused(tiny_model: Path, tmp_path: Path, name: str) -> None:
    config = training(f"teacher_model.model_name_or_path={tiny_model}", f"train.attn_implementation={name}")
    with pytest.raises(ConfigError, match=f"cannot be loaded with train.attn_implementation={name}: "):
        load_policy(config, training_arguments(config, tmp_path))


@pytest.mark.parametrize("key", ["use_liger_kernel", "activation_offloading"])
def test_what_needs_a_gpu_is_refused_without_one(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"train.{key} is true, but this process sees no GPU"):
        training_arguments(training(f"train.{key}=true"), tmp_path)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_check_gpu", lambda _: None)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_liger_replaces_layers_of_policy_and_reference_but_not_the_head(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = training(f"teacher_model.model_name_or_path={tiny_model}", "train.use_liger_kernel=true", "train.beta=0.1")
    training_args = training_arguments(config, tmp_path)
    with pytest.raises(ConfigError, match="train.use_liger_kernel is true, but .*pip install liger-kernel"):
        load_policy(config, training_args)
    monkeypatch.setattr(model_loading, "apply_liger_kernel", lambda *_: None)
    with pytest.raises(ConfigError, match="Liger has no kernels for qwen"):
        load_policy(config, training_args)
    kernel_options = []

    def replace_a_norm(model: Any, kernels: dict[str, bool]) -> None:
        model.base_model.norm.forward = model.base_model.norm.forward
        kernel_options.append(kernels)

    monkeypatch.setattr(model_loading, "apply_liger_kernel", replace_a_norm)
    load_policy(config, training_args)
    assert kernel_options == [{"cross_entropy": False, "fused_linear_cross_entropy": False}] * 2


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_the_forward_pass_stores_is_moved_and_the_gradients_stay(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's context itself needs a GPU; torch's stands in for it."""
    moved_shapes = []

    def move(stored: torch.Tensor) -> torch.Tensor:
        moved_shapes.append(stored.shape)
        return stored.clone()

    hooks = torch.autograd.graph.saved_tensors_hooks(move, lambda stored: stored)
    monkeypatch.setattr(loop, "get_act_offloading_ctx_manager", lambda model: hooks)
    model, gradients = save_tiny_model(tmp_path / "model", world / "blank"), []
    for value in ("false", "true"):
        trainer = offline_trainer(tmp_path / value, model, [f"train.activation_offloading={value}"])
        trainer.create_optimizer()
        trainer.training_step(trainer.model, {})
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]))
        assert bool(moved_shapes) == (value == "true")
    assert torch.equal(*gradients)
