"""An engine's sleep on a real GPU: it frees the memory, gives the same answers after waking, and after many cycles
takes no more memory than before. Skipped without a GPU."""

import asyncio
import os
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.engines.vllm.engine import VllmEngine
from classroom_rl.launch.doctor import find_gpus
from classroom_rl.memory.sources import gpu_is_there
from classroom_rl.rollout.engine import Sampling
from classroom_rl.system.gpu_memory import gpu_memory_used
from tests.conftest import GPU_SHARE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_is_there(), reason="there is no NVIDIA GPU here")]

PROMPT = list(range(5, 37))
CYCLES = 20


async def sleep_and_wake(model: Path, index: int) -> tuple[list[int], list[list[int]]]:
    """Memory in use awake, then asleep and awake again in each cycle; what was said before and after each."""
    options = VllmConfig(max_length=256, gpu_memory_utilization=GPU_SHARE, dtype="bfloat16", enforce_eager=True)
    engine = await VllmEngine.start(ModelConfig(str(model), options), 1, GenerationConfig(colocate=True))
    greedy = Sampling(0.0, max_tokens=16)
    try:
        used, answers = [gpu_memory_used(index)], [list((await engine.generate(PROMPT, greedy)).ids)]
        for _ in range(CYCLES):
            await engine.sleep(60)
            used.append(gpu_memory_used(index))
            await engine.wake_up()
            used.append(gpu_memory_used(index))
            answers.append(list((await engine.generate(PROMPT, greedy)).ids))
    finally:
        engine.shutdown()
    return used, answers


def test_an_engine_asleep_gives_its_memory_back_and_says_the_same_afterwards(world: Path) -> None:
    gpu = find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))[0][0]
    used, answers = asyncio.run(sleep_and_wake(world / "blank", gpu.index))
    share = GPU_SHARE * (gpu.memory << 20)
    awake, asleep = used[0::2], used[1::2]
    assert awake[0] - asleep[0] > share / 2, "most of an engine's share is its cache"
    assert abs(awake[1] - awake[0]) < share / 10
    assert asleep[-1] - asleep[0] < share / 50 and awake[-1] - awake[1] < share / 50, "a leak adds up"
    assert all(answer == answers[0] for answer in answers)
