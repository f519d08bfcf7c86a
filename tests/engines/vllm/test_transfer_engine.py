"""Weights that come from a sender's memory into a real engine, on the CPU over gloo."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from classroom_rl.errors import EngineFailure
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.trainer.sharded_save import described_weights, gathered_weights
from classroom_rl.trainer.weight_sender import WeightSender
from tests.models.test_lora import scores
from tests.support.dying_sender import dying_sender
from tests.support.receiving_engine import PROMPT, ReceivingEngine, receiving_engine

CPU = torch.device("cpu")
SEVERAL_BUFFERS = 200_000


@pytest.fixture(scope="module")
def engine(world: Path) -> Iterator[ReceivingEngine]:
    with receiving_engine(world / "blank") as running:
        yield running


@pytest.fixture
def model(world: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(world / "blank", dtype=torch.float32)


def change(model: PreTrainedModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def send(sender: WeightSender, model: PreTrainedModel, version: int) -> None:
    sender.send(PolicyVersion("run", version), described_weights(model), gathered_weights(model, True, CPU))


def difference(engine: ReceivingEngine, model: PreTrainedModel) -> float:
    completion = engine.sample()
    return (scores(model, PROMPT, list(completion.ids)) - torch.tensor(completion.logprobs)).abs().max().item()


def test_engine_and_model_agree_after_every_version(engine: ReceivingEngine, model: PreTrainedModel) -> None:
    """The head is tied to the embeddings, and the prompt's prefix was cached with the weights before."""
    assert model.config.tie_word_embeddings
    sender = WeightSender([engine], CPU, 60, SEVERAL_BUFFERS)
    before = difference(engine, model)
    change(model, 0)
    assert before < 1e-4 and difference(engine, model) > 0.1
    groups, fingerprints = set(), set()
    for version in range(1, 8):
        change(model, version)
        send(sender, model, version)
        assert engine.sample(1).policy == PolicyVersion("run", version)
        assert difference(engine, model) <= 1e-5
        groups.add(engine.engine.health().weight_group)
        fingerprints.add(engine.engine.weights)
    assert len(groups) == 1 and len(fingerprints) == 7
    send(sender, model, 8)
    assert engine.engine.weights in fingerprints, "equal weights"


@pytest.mark.parametrize(("with_signal", "deadline_s"), [(signal.SIGKILL, 120.0), (signal.SIGSTOP, 10.0)])
def test_nothing_is_sampled_from_half_a_version(
    with_signal: signal.Signals, deadline_s: float, world: Path, model: PreTrainedModel
) -> None:
    """The sender dies, or hangs, after some of the buffers: the engine notices, or its deadline passes. It then samples
    nothing any more, and the next engine takes the version that is sent again."""
    with receiving_engine(world / "blank", deadline_s) as engine:
        change(model, 1)
        send(WeightSender([engine], CPU, 60, SEVERAL_BUFFERS), model, 1)
        assert difference(engine, model) <= 1e-5
        with dying_sender(world / "blank", with_signal, 3, SEVERAL_BUFFERS) as (process, group, tensors):
            started = time.monotonic()
            receiving = engine.begin(engine.receive(group, tensors, PolicyVersion("run", 2)))
            waiting = engine.begin(engine.generate())
            with pytest.raises(EngineFailure, match="may hold parts of the old weights and of the new ones"):
                receiving.result(deadline_s + 10)
            took_s = time.monotonic() - started
            died = with_signal == signal.SIGKILL
            assert took_s < 30 if died else deadline_s <= took_s
            with pytest.raises(EngineFailure):
                waiting.result(5)
            with pytest.raises(EngineFailure):
                engine.sample(1)
            assert engine.engine.policy == PolicyVersion("run", 1)
            stopping = time.monotonic()
            engine.engine.shutdown()
            assert time.monotonic() - stopping < 20
