"""vLLM in one line: what it refuses before anything starts, and rollouts on it."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from classroom_rl import HfEngine, Rollouts, RolloutSet
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import load
from classroom_rl.engines.vllm.engine import open_vllm
from classroom_rl.errors import ConfigError
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.verdicts import answer_schema
from classroom_rl.models.random_model import write_tiny_chat_model
from classroom_rl.rollout.engine import Sampling
from tests.support.published_rows import mathdial_flat
from tests.support.tutor_messages import write_rows


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
            rollouts = await runner.run(["Say a number."], lambda rollout, step: "Again.", copies=3, progress=False)
            return rollouts, await runner.replay(rollouts, progress=False)
        finally:
            engine.shutdown()

    import torch

    rollouts, replayed = asyncio.run(play())
    assert [[step.ids for step in rollout.steps] for rollout in replayed] == [
        [step.ids for step in rollout.steps] for rollout in rollouts
    ]
    network = HfEngine(model, device="cpu")._model
    for row in rollouts.rows():
        ids = [*row.prompt_ids, *row.completion_ids]
        with torch.inference_mode():
            logprobs = network(torch.tensor([ids])).logits[0].log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0] * torch.tensor(row.mask)
        assert row.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_published_benchmark_loads_its_tutor_alone(model: Path, tmp_path: Path) -> None:
    """The second of two problems is longer than its context."""
    short, long = mathdial_flat(0), mathdial_flat(1)
    path = write_rows(tmp_path / "mathdial.jsonl", [short, long | {"question": long["question"] * 30}])
    options = "{dtype: float32, enforce_eager: true, gpu_memory_utilization: 0.1, max_length: 256, cpu_cores: '0'}"
    arguments = [f"benchmark.path={path}", f"logging.save_dir={tmp_path / 'run'}", "generation.max_tokens_per_turn=8"]
    tutor = [f"teacher_model.model_name_or_path={model}", f"teacher_model.vllm={options}"]
    config = load(EvalConfig, "eval", ["--config-name", "mathdial", *arguments, *tutor], check_eval)
    config.benchmark.prompts_paths["tutor"] = str(tmp_path / "problem.txt")
    (tmp_path / "problem.txt").write_text("{{ problem }}", encoding="utf-8")
    summary = evaluate(config)
    assert summary["tutor"] == str(model) and summary["policy"] is None and summary["paid"] is None
    assert summary["turns"] == 6 == summary["answered"] + sum(summary["failures"].values())
    assert summary["failures"].pop("too long") == 3 and set(summary["failures"]) <= {"empty"}


@pytest.mark.full
def test_under_a_schema_a_model_that_knows_nothing_writes_an_object_of_that_form(model: Path) -> None:
    decision = {"type": "string", "enum": ["OK", "REJECT"]}
    short = {"type": "object", "properties": {"decision": decision}, "required": ["decision"]}
    judges = answer_schema("does_not_leak_answer")

    async def sample(*schemas: dict | None) -> list[str]:
        engine = await open_vllm(model, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.1)
        try:
            messages = [{"role": "user", "content": "Say a number."}]
            answers = [
                engine.chat(messages, Sampling(1.0, max_tokens=100, seed=seed, schema=schema))
                for seed in range(5)
                for schema in schemas
            ]
            return [answer.text for answer in await asyncio.gather(*answers)]
        finally:
            engine.shutdown()

    texts = asyncio.run(sample({**short, "additionalProperties": False}, judges, None))
    assert all(json.loads(text)["decision"] in ("OK", "REJECT") for text in texts[::3])
    assert all(re.match(r'\{\s*"reasoning"\s*:\s*"', text) for text in texts[1::3])
    assert not any(text.startswith("{") for text in texts[2::3])
