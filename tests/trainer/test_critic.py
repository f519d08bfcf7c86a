"""The critic's head: what its two kinds are, and their files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from classroom_rl.config.values import LINEAR, MLP
from classroom_rl.errors import ConfigError
from classroom_rl.trainer.critic import HEAD_FILE, ValueHead, head_weights, kind_of, read_head, write_head
from tests.support.offline_trainer import offline_trainer, save_tiny_model

CPU = torch.device("cpu")
PPO = ["train.algorithm=ppo", "train.beta=0", "train.mu=1", "train.ppo.head=mlp"]


def states(count: int, width: int) -> torch.Tensor:
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [LINEAR, MLP])
def test_every_value_is_0_at_first(kind) -> None:
    assert not ValueHead(8, CPU, kind)(states(20, 8)).any()


def test_an_mlp_learns_what_no_linear_function_can() -> None:
    """The product of two features, whose best linear prediction is 0."""
    hidden = states(200, 8)
    targets = hidden[..., 0] * hidden[..., 1]

    def error(kind: Any) -> float:
        head = ValueHead(8, CPU, kind)
        optimizer = torch.optim.Adam(head.parameters(), 1e-2)
        for _ in range(300):
            optimizer.zero_grad()
            loss = (head(hidden) - targets).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item() / targets.var().item()

    assert error(MLP) < 0.1 and error(LINEAR) > 0.8


def test_values_of_an_mlp_are_those_of_its_formula_in_float32() -> None:
    """Also where weights and hidden states are in half precision, under autocast."""
    head = ValueHead(8, CPU, MLP)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(2))
        head.inner_bias.fill_(0.1)
        head.offset.fill_(0.5)
    head, hidden = head.bfloat16(), states(20, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        values = head(hidden)
    weights = {name: weight.double() for name, weight in head.state_dict().items()}
    inner = (hidden.double() @ weights["inner_weight"].T + weights["inner_bias"]).clamp(min=0)
    expected = inner @ weights["weight"][0] + weights["bias"] + weights["offset"]
    assert values.dtype == torch.float32 and torch.allclose(values.double(), expected, rtol=0, atol=1e-5)


def test_every_process_draws_the_same_head_and_nothing_else_differs_by_it() -> None:
    torch.manual_seed(1)
    head, drawn = ValueHead(8, CPU, MLP), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    assert torch.equal(head.inner_weight, ValueHead(8, CPU, MLP).inner_weight) and head.inner_weight.std() > 0.2


@pytest.mark.parametrize(("saved", "wanted"), [(LINEAR, MLP), (MLP, LINEAR)])
def test_a_checkpoint_with_another_head_is_refused_in_one_sentence(tmp_path: Path, saved, wanted) -> None:
    write_head(head_weights(ValueHead(8, CPU, saved)), tmp_path / HEAD_FILE)
    assert kind_of(tmp_path / HEAD_FILE) == saved
    with pytest.raises(ConfigError) as raised:
        read_head(ValueHead(8, CPU, wanted), tmp_path / HEAD_FILE)
    text = str(raised.value)
    assert f"with train.ppo.head={saved}, and train.ppo.head is {wanted} now: set it back" in text and ". " not in text


@pytest.mark.parametrize("more", [[], ["teacher_model.lora.enable=true"]], ids=["whole", "LoRA"])
def test_a_step_trains_all_of_an_mlp_at_its_own_rate_and_a_checkpoint_keeps_it(
    world: Path, tmp_path: Path, more: list[str]
) -> None:
    model = save_tiny_model(tmp_path / "model", world / "blank")
    overrides = [*PPO, "train.ppo.value_learning_rate=0.02", *more]
    trainer = offline_trainer(tmp_path / "run", model, overrides)
    head = trainer.algorithm.value_head
    trainer.create_optimizer()
    for group in trainer.optimizer.param_groups:
        of_head = [any(parameter is weight for weight in head.parameters()) for parameter in group["params"]]
        assert of_head == [group["lr"] == 0.02] * len(of_head)
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    for _ in range(2):  # the outer layer begins at 0, and lets no gradient through in the first step
        trainer.loss_and_gradients(trainer.batch())
        trainer.optimizer.step()
    assert all(not torch.equal(weight, before[name]) for name, weight in head.named_parameters())
    trainer.save_model(str(tmp_path / "saved"))
    loaded = offline_trainer(tmp_path / "again", model, overrides, checkpoint=tmp_path / "saved").algorithm.value_head
    assert all(torch.equal(weight, head.state_dict()[name]) for name, weight in loaded.state_dict().items())
