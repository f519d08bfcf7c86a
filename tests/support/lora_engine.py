"""Runs a single engine that answers each line of stdin with a line on stdout. tests/models/test_lora.py and
tests/engines/vllm/test_worker_extension.py start it with `lora_engine`.

A line is empty, or names a folder to load and the number of its policy version. The answer holds the log-probs of one
sampled turn and of one at a lower temperature, the policy version that sampled it, the ids of the adapters in vLLM, and
whether vLLM uses its newer model runner.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import LoraConfig, VllmConfig
from classroom_rl.config.train_rl import TeacherModelConfig
from classroom_rl.engines.vllm.engine import VllmEngine
from classroom_rl.errors import DataError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import Sampling
from tests.conftest import GPU_SHARE, ROOT

COOLER = 0.5
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 8  # longer than a block of vLLM's prefix cache


@contextmanager
def lora_engine(model: Path, lora: dict | None, **environment: str) -> Iterator[Callable[..., SimpleNamespace]]:
    """The engine in a process of its own, which is asked with `ask(folder, version)`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.lora_engine", str(model), json.dumps(lora)],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(folder: Path | str = "", version: int = 0) -> SimpleNamespace:
        process.stdin.write(f"{folder}\t{version}\n")
        process.stdin.flush()
        line = next(line for line in process.stdout if line.startswith("answer "))
        return SimpleNamespace(**json.loads(line.removeprefix("answer ")))

    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait(120)
        process.stdout.close()


async def answer(engine: VllmEngine, folder: str, version: str) -> dict:
    refused = None
    if folder:
        try:
            await engine.load_policy(Path(folder), PolicyVersion("run", int(version)), 60)
        except DataError as error:
            refused = str(error)
    completion = await engine.generate(PROMPT, Sampling(1.0, max_tokens=24))
    cooler = await engine.generate(PROMPT, Sampling(COOLER, max_tokens=8))
    return {
        "ids": completion.ids,
        "logprobs": completion.logprobs,
        "cooler": {"ids": cooler.ids, "logprobs": cooler.logprobs},
        "version": completion.policy.version,
        "adapters": sorted(await engine.client.list_loras()) if engine.adapter else [],
        "newer_runner": engine.client.vllm_config.use_v2_model_runner,
        "refused": refused,
    }


async def main(model: str, lora: dict | None) -> None:
    sizes = {"max_length": 256, "max_num_seqs": 4, "gpu_memory_utilization": GPU_SHARE}
    options = VllmConfig(**sizes, dtype="float32", enforce_eager=True, cpu_cores="0")
    adapter = LoraConfig(enable=True, **lora) if lora is not None else LoraConfig()
    teacher = TeacherModelConfig(model, options, lora=adapter)
    engine = await VllmEngine.start(teacher, 1, GenerationConfig())
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            folder, _, version = line.rstrip("\n").partition("\t")
            print("answer " + json.dumps(await answer(engine, folder, version)), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
