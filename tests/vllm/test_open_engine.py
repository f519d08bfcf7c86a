"""vLLM in one line: what it refuses before anything starts, and rollouts on it."""

import asyncio
from pathlib import Path

import pytest

from src.errors import ConfigError
from src.models.tiny_chat_model import write_tiny_chat_model
from src.rollout import HfEngine, Rollouts, RolloutSet
from src.vllm.open_engine import open_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("tiny") / "model", ["Say a number."], context=256)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 1.0}, "no option temperature. It has: .*dtype"),
        ({"max_len": 9}, "no option max_len"),
        ({"max_length": 300}, "max_length is 300, but .* at most 256 tokens"),
    ],
)
def test_what_it_has_not_is_refused_before_vllm_starts(model: Path, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(open_vllm(model, **options))


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="nothing/at/all"):
        asyncio.run(open_vllm("nothing/at/all"))


@pytest.mark.full
def test_rollouts_are_the_same_in_kind_on_vllm_and_on_transformers(model: Path) -> None:
    """The log-probs that vLLM gives for its tokens are those of a forward pass over the rows made of them."""

    async def play() -> tuple[RolloutSet, RolloutSet]:
        engine = await open_vllm(model, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.1)
        try:
            runner = Rollouts(engine, max_steps=3, history="with_thinking", max_tokens=6)
            done = await runner.run(["Say a number."], lambda rollout, step: "Again.", copies=3, progress=False)
            return done, await runner.replay(done, progress=False)
        finally:
            engine.shutdown()

    import torch

    done, again = asyncio.run(play())
    assert [[step.ids for step in each.steps] for each in again] == [[step.ids for step in each.steps] for each in done]
    network = HfEngine(model, device="cpu")._model
    for row in done.rows():
        whole = [*row.prompt_ids, *row.completion_ids]
        with torch.inference_mode():
            logprobs = network(torch.tensor([whole])).logits[0].log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        wanted = logprobs.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0] * torch.tensor(row.mask)
        assert row.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)
