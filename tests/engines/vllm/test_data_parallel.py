"""Two copies of a model behind one engine, on CPUs: both answer, both get published weights, and both end together."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.engines.vllm.engine import VllmEngine, engine_arguments
from classroom_rl.errors import ConfigError, EngineFailure
from classroom_rl.models.policy_folder import write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import Completion, Sampling

OPTIONS = {"max_length": 128, "max_num_seqs": 8, "dtype": "float32", "enforce_eager": True}
PROMPTS = [[5, 6, 7 + index] for index in range(12)]
DEADLINE_S = 60


@asynccontextmanager
async def two_copies(model: Path) -> AsyncIterator[VllmEngine]:
    config = ModelConfig(str(model), VllmConfig(data_parallel_size=2, **OPTIONS))
    engine = await VllmEngine.start(config, 1, GenerationConfig(turn_timeout_s=DEADLINE_S))
    try:
        yield engine
    finally:
        engine.shutdown()


async def sample_all(engine: VllmEngine) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(prompt, Sampling(1.0, max_tokens=6)) for prompt in PROMPTS))


def tokens_by_copy(engine: VllmEngine) -> dict[str, float]:
    samples = [sample for metric in engine.metrics() for sample in metric.samples]
    return {
        sample.labels["engine"]: sample.value for sample in samples if sample.name == "vllm:generation_tokens_total"
    }


def assert_sampled_from(model: torch.nn.Module, answers: list[Completion]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        assert (expected - torch.tensor(answer.logprobs)).abs().max() < 1e-4


def published(tiny_model: Path, folder: Path) -> tuple[Path, torch.nn.Module]:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    write_policy(folder, PolicyVersion("run", 1), model.save_pretrained)
    return folder, model.eval()


@pytest.mark.full  # two engines and a coordinator start
def test_both_copies_answer_load_weights_wait_and_end_together(tiny_model: Path, tmp_path: Path) -> None:
    async def use() -> None:
        async with two_copies(tiny_model) as engine:
            pids = engine.health().pids
            assert len(pids) >= 3, "two copies and their coordinator"
            base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
            assert_sampled_from(base, await sample_all(engine))
            before = tokens_by_copy(engine)
            assert set(before) == {"0", "1"} and min(before.values()) > 0

            folder, trained = published(tiny_model, tmp_path / "v1")
            await engine.load_policy(folder, PolicyVersion("run", 1), DEADLINE_S)
            assert_sampled_from(trained, await sample_all(engine))
            after = tokens_by_copy(engine)
            assert all(after[copy] > before[copy] for copy in before), "both have answered with the new weights"

            await engine.sleep(DEADLINE_S)
            waiting = asyncio.create_task(sample_all(engine))
            await asyncio.sleep(0.5)
            assert not waiting.done() and tokens_by_copy(engine) == after
            await engine.wake_up()
            assert_sampled_from(trained, await waiting)

            victim = next(pid for pid in pids if "EngineCore_DP1" in " ".join(psutil.Process(pid).cmdline()))
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(EngineFailure, match=r"engine of .* failed"):
                await sample_all(engine)
            with pytest.raises(EngineFailure, match="died"):
                engine.check_alive()
        gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], DEADLINE_S)
        assert not alive

    asyncio.run(use())


def test_further_arguments_of_vllm_are_passed_on_and_those_set_here_refused(tiny_model: Path) -> None:
    def arguments(**extra: object):
        options = VllmConfig(extra=extra, gpus=[3, 1], data_parallel_size=2, **OPTIONS)
        return engine_arguments(ModelConfig(str(tiny_model), options), 1, False, "generate")

    engine_args = arguments(kv_cache_dtype="fp8")
    assert (engine_args.kv_cache_dtype, engine_args.device_ids, engine_args.data_parallel_size) == ("fp8", [3, 1], 2)
    with pytest.raises(ConfigError, match=r"vllm\.extra has no_such, which vLLM's AsyncEngineArgs do not have"):
        arguments(no_such=1)
    with pytest.raises(ConfigError, match=r"vllm\.extra has seed, trust_remote_code, which this project sets itself"):
        arguments(trust_remote_code=True, seed=3)
