"""The engine on transformers, with a real tiny model: its log-probs, seeds, limits, and rollouts on it."""

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl import HfEngine, Rollouts
from classroom_rl.errors import ConfigError, ContextOverflow, EngineFailure
from classroom_rl.rollout.chat_template import encode_chat
from classroom_rl.rollout.engine import Completion, Sampling, TokenEngine
from classroom_rl.rollout.step import End


def ids_of(engine: HfEngine, text: str) -> list[int]:
    return encode_chat(engine.tokenizer, [{"role": "user", "content": text}])


def ask(engine: HfEngine, *asked: tuple[list[int], Sampling]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(*request) for request in asked))

    return asyncio.run(all_of_them())


def logits_after(engine: HfEngine, prompt: Sequence[int], ids: Sequence[int]):
    """The model's logits for each of `ids`, by one forward pass without padding or cache."""
    import torch

    with torch.inference_mode():
        logits = engine._model(torch.tensor([[*prompt, *ids]])).logits[0]
    return logits[len(prompt) - 1 : -1].float()


def test_it_is_an_engine_with_tokens(hf_engine: HfEngine) -> None:
    assert isinstance(hf_engine, TokenEngine)
    assert hf_engine.max_length == 400 and not hf_engine.frame.opens_thought
    assert hf_engine.health().engine == "transformers"


def test_log_probs_are_those_of_a_forward_pass_over_the_same_ids(hf_engine: HfEngine) -> None:
    import torch

    prompts = [ids_of(hf_engine, text) for text in ("Say a number.", "a", "What is it? " * 9)]
    completions = ask(hf_engine, *((prompt, Sampling(0.7, seed=n, max_tokens=12)) for n, prompt in enumerate(prompts)))
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = (logits_after(hf_engine, prompt, completion.ids) / 0.7).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert completion.text == hf_engine.tokenizer.decode(completion.ids)


def test_log_probs_are_those_of_the_distribution_after_top_k_and_top_p(hf_engine: HfEngine) -> None:
    import torch

    prompt = ids_of(hf_engine, "Say a number.")
    (completion,) = ask(hf_engine, (prompt, Sampling(1.0, top_k=3, seed=1, max_tokens=20)))
    logits = logits_after(hf_engine, prompt, completion.ids)
    best = logits.topk(3)
    for index, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
        rank = best.indices[index].tolist().index(token)
        assert logprob == pytest.approx(best.values[index].log_softmax(-1)[rank].item(), abs=1e-4)
    (narrow,) = ask(hf_engine, (prompt, Sampling(1.0, top_p=1e-6, seed=1, max_tokens=20)))
    greedy = logits_after(hf_engine, prompt, narrow.ids).argmax(-1)
    assert list(narrow.ids) == greedy.tolist()
    assert narrow.logprobs == pytest.approx([0.0] * 20), "only one token is left to sample from"
    assert torch.isfinite(torch.tensor(completion.logprobs)).all()


def test_temperature_zero_takes_the_most_probable_tokens(hf_engine: HfEngine) -> None:
    prompt = ids_of(hf_engine, "Say a number.")
    one, other = ask(hf_engine, *((prompt, Sampling(0.0, seed=seed, max_tokens=8)) for seed in (1, 2)))
    assert one.ids == other.ids
    logits = logits_after(hf_engine, prompt, one.ids)
    assert list(one.ids) == logits.argmax(-1).tolist()
    assert one.logprobs == pytest.approx(logits.log_softmax(-1).max(-1).values.tolist(), abs=1e-4)


def test_a_seed_gives_the_same_tokens_whoever_is_in_the_batch(hf_engine: HfEngine) -> None:
    request = ids_of(hf_engine, "Say a number."), Sampling(1.0, seed=7, max_tokens=16)
    (alone,) = ask(hf_engine, request)
    others = [
        (ids_of(hf_engine, "What is it? " * n), Sampling(0.5 + n / 10, seed=n, max_tokens=4 * n)) for n in range(1, 8)
    ]
    for index in (0, 3, 7):
        batch = [*others[:index], request, *others[index:]]
        completion = ask(hf_engine, *batch)[index]
        assert completion.ids == alone.ids and completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    changed, unseeded, unseeded_again = ask(
        hf_engine, *((request[0], replace(request[1], seed=seed)) for seed in (8, None, None))
    )
    assert len({changed.ids, unseeded.ids, unseeded_again.ids, alone.ids}) == 4


def test_samples_have_the_frequencies_of_the_distribution(hf_engine: HfEngine) -> None:
    """One token each, of the three most probable ones, 600 times."""
    prompt = ids_of(hf_engine, "Say a number.")
    completions = ask(hf_engine, *((prompt, Sampling(2.0, top_k=3, seed=seed, max_tokens=1)) for seed in range(600)))
    logits = logits_after(hf_engine, prompt, [0])[0] / 2
    values, tokens = logits.topk(3)
    for share, token in zip(values.softmax(-1).tolist(), tokens.tolist(), strict=True):
        frequency = sum(completion.ids == (token,) for completion in completions) / 600
        assert frequency == pytest.approx(share, abs=4 * (share * (1 - share) / 600) ** 0.5)


def test_each_message_ends_at_its_own_limit_or_end_token(hf_engine: HfEngine) -> None:
    prompt = ids_of(hf_engine, "Say a number.")
    completions = ask(hf_engine, *((prompt, Sampling(1.0, seed=n, max_tokens=1 + n % 7)) for n in range(14)))
    assert [len(completion.ids) for completion in completions] == [1 + n % 7 for n in range(14)]
    assert not any(completion.ended for completion in completions)


def test_a_message_ends_with_an_end_token_that_is_no_part_of_its_text(hf_engine: HfEngine) -> None:
    import torch

    prompt, stop = ids_of(hf_engine, "Say a number."), hf_engine.frame.turn_end_id
    weight = hf_engine._model.lm_head.weight
    before = weight.detach().clone()
    best = logits_after(hf_engine, prompt, [0])[0].argmax()
    with torch.no_grad():
        weight[stop] = weight[best] * 1.5
    try:
        ended, longer = ask(
            hf_engine, (prompt, Sampling(0.0, max_tokens=9)), (prompt, Sampling(3.0, seed=5, max_tokens=9))
        )
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert (ended.ids, ended.text, ended.ended) == ((stop,), "", True)
    assert len(longer.ids) > 1, "a message that goes on is not ended by its neighbour's end"


def test_a_prompt_without_room_is_refused_and_little_room_cuts(hf_engine: HfEngine) -> None:
    prompt = (ids_of(hf_engine, "Say a number.") * 40)[:400]
    with pytest.raises(ContextOverflow, match="400 tokens does not fit"):
        ask(hf_engine, (prompt, Sampling(1.0)))
    (completion,) = ask(hf_engine, (prompt[:-3], Sampling(1.0, seed=1, max_tokens=50)))
    assert len(completion.ids) <= 3


def test_an_error_of_the_model_reaches_all_who_asked(tiny_model: Path) -> None:
    engine = HfEngine(tiny_model, device="cpu")

    def broken(*_, **__) -> None:
        raise RuntimeError("out of memory")

    engine._model.generate = broken
    failed = asyncio.run(Rollouts(engine).run(["a", "b"], progress=False))
    assert [rollout.end.state for rollout in failed] == ["failed", "failed"] and "out of memory" in failed[0].end.detail
    engine.shutdown()
    with pytest.raises(EngineFailure, match="was shut down"):
        ask(engine, ([1], Sampling(1.0)))


def test_what_cannot_be_loaded_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere/at/all"):
        HfEngine("nowhere/at/all")
    with pytest.raises(ConfigError, match="dtype is float3"):
        HfEngine(tiny_model, dtype="float3")
    with pytest.raises(ConfigError, match="batch_size is 0"):
        HfEngine(tiny_model, batch_size=0)


def test_a_loaded_model_is_taken_as_it_is(hf_engine: HfEngine) -> None:
    engine = HfEngine(hf_engine._model, tokenizer=hf_engine.tokenizer)
    request = ids_of(engine, "a"), Sampling(1.0, seed=1, max_tokens=5)
    assert ask(engine, request)[0].ids == ask(hf_engine, request)[0].ids


# Rollouts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", ["with_thinking", "without_thinking"])
def test_rollouts_are_recorded_and_played_again_with_equal_tokens(hf_engine: HfEngine, history: str) -> None:
    runner = Rollouts(hf_engine, max_steps=4, history=history, max_tokens=6, seed=3)
    functions = {
        "next_prompt": lambda rollout, step: "Higher." if len(rollout.last.content) % 2 else "Lower.",
        "stop": lambda rollout, last: "a digit" if any(sign.isdigit() for sign in last.content) else False,
    }
    rollouts = asyncio.run(runner.run(["Say a number.", "What is it?"], copies=3, progress=False, **functions))
    tokens = [[(step.prompt_ids, step.ids, step.seed) for step in rollout.steps] for rollout in rollouts]
    replayed = asyncio.run(Rollouts(hf_engine).replay(rollouts, progress=False))
    assert [[(step.prompt_ids, step.ids, step.seed) for step in rollout.steps] for rollout in replayed] == tokens
    assert [rollout.end for rollout in replayed] == [rollout.end for rollout in rollouts]
    assert len(set(map(str, tokens))) == 6, "copies have seeds of their own"
    for row in rollouts.rows():
        import torch

        logits = logits_after(hf_engine, row.prompt_ids, row.completion_ids).log_softmax(-1)
        expected = logits.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0] * torch.tensor(row.mask)
        assert row.logprobs == pytest.approx(expected.tolist(), abs=1e-4), "log-probs stand at their tokens"


def test_a_full_context_truncates(hf_engine: HfEngine) -> None:
    runner = Rollouts(hf_engine, history="with_thinking", max_tokens=60)
    (rollout,) = asyncio.run(runner.run(["Go."], next_prompt=lambda r, n: "Again, please.", progress=False))
    assert rollout.end.state == "truncated" and rollout.end.reason == "context full" and rollout.steps[-1].cut
    assert rollout.answer is None
    (single,) = asyncio.run(Rollouts(hf_engine, max_tokens=3).run(["Go."], progress=False))
    assert single.end == End("truncated", "max_tokens")


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    gone = ("torch", "safetensors")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in gone else find_spec(name, *more)
    )
    with pytest.raises(ConfigError, match=r"HfEngine needs torch, safetensors, .*pip install '\.\[hf\]'"):
        HfEngine("any/model")


def test_its_module_is_imported_without_its_extra() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'safetensors', 'tokenizers')))\n"
        "from classroom_rl import HfEngine"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
