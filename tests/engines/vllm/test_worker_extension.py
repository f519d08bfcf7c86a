"""vLLM's two model runners: the newer one is the default on GPUs and needs Triton, the older one is the only one on
CPUs. Both run here on the CPU, the newer one with Triton's interpreter, because this project's worker extension has to
work with both."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from classroom_rl.config.models import LoraConfig
from classroom_rl.models.policy_folder import write_policy
from classroom_rl.models.policy_version import PolicyVersion
from tests.conftest import ROOT
from tests.models.test_lora import LORA, adapted, publish, scores, step
from tests.support.lora_engine import COOLER, PROMPT, lora_engine

pytestmark = pytest.mark.full  # the interpreter takes seconds for a sentence

RUNNERS = {"older": "0", "newer": "1"}


@contextmanager
def engine(model: Path, lora: dict | None, runner: str) -> Iterator[Callable[..., SimpleNamespace]]:
    """An engine of its own with one of the runners, which is asked with `ask(folder, version)`."""
    environment = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]}
    if runner == "newer":  # the older one would have torch compile with what only stands in for a Triton backend
        python_path = ROOT / "tests" / "support" / "triton_interpreter"
        environment["TRITON_INTERPRET"] = "1"
        environment["PYTHONPATH"] = f"{python_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with lora_engine(model, lora, **environment) as ask_it:

        def ask(folder: Path | str = "", version: int = 0) -> SimpleNamespace:
            answer = ask_it(folder, version)
            assert answer.newer_runner == (runner == "newer") and answer.version == version
            return answer

        yield ask


def assert_said_by(model: torch.nn.Module, answer: SimpleNamespace, *others: torch.nn.Module) -> None:
    logprobs = torch.tensor(answer.logprobs)
    assert (scores(model, PROMPT, answer.ids) - logprobs).abs().max() < 1e-3
    with torch.no_grad():
        prompt, ids = torch.tensor(PROMPT), torch.tensor(answer.cooler["ids"])
        logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1] / COOLER
    cooler = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    assert (cooler - torch.tensor(answer.cooler["logprobs"])).abs().max() < 2e-3, "after the temperature, not before"
    for other in others:
        assert (scores(other, PROMPT, answer.ids) - logprobs).abs().mean() > 0.02


@pytest.mark.parametrize("runner", RUNNERS)
def test_weights_are_loaded_in_place_with_tied_embeddings(runner: str, world: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(world / "blank", dtype=torch.float32)
    assert model.config.tie_word_embeddings
    with engine(world / "blank", None, runner) as ask:
        assert_said_by(model, ask())
        for version in (1, 2):
            before = copy.deepcopy(model)
            torch.manual_seed(version)
            for parameter in model.parameters():
                parameter.data.add_(0.05 * torch.randn_like(parameter))
            folder = tmp_path / f"v{version}"
            write_policy(folder, PolicyVersion("run", version), model.save_pretrained)
            assert_said_by(model, ask(folder, version), before)


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_adapter_takes_the_place_of_the_one_before(runner: str, world: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(world / "blank", dtype=torch.float32)
    model = adapted(world / "blank", LoraConfig(**LORA))
    with engine(world / "blank", LORA, runner) as ask:
        assert_said_by(base, ask())
        for version in (1, 2):
            before = copy.deepcopy(model)
            step(model, seed=version)
            assert_said_by(model, ask(publish(model, tmp_path / f"v{version}", version), version), before, base)
