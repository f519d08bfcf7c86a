"""One rollout: which prompts it may begin with, what its steps hold, how it ends, and what its functions may do."""

import asyncio
from dataclasses import replace

import pytest

from classroom_rl.errors import ContextOverflow, DataError, EngineFailure, ProviderFailure, RolloutsStopped
from classroom_rl.rollout.engine import Completion
from classroom_rl.rollout.player import derive_seed
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.step import End
from tests.support.played_rollouts import always, echo, play
from tests.support.scripted_chat import ScriptedChat
from tests.support.scripted_engine import ScriptedEngine

# Prompts -------------------------------------------------------------------------------------------------------------


def test_prompts_come_as_text_problems_entries_and_messages() -> None:
    conversation = [
        {"role": "system", "content": "Own."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompts = ["text", Problem.of("2 + 2?", "4"), {"prompt": "entry", "level": 3}, conversation]
    rollouts = play(ScriptedChat(echo), prompts, copies=2, system="All.")
    assert [(rollout.id, rollout.prompt_index, rollout.copy) for rollout in rollouts[:3]] == [
        ("0-0", 0, 0),
        ("0-1", 0, 1),
        ("1-0", 1, 0),
    ]
    assert [rollout.first_prompt for rollout in rollouts[::2]] == ["text", "2 + 2?", "entry", "c"]
    assert rollouts[2].meta["answer"] == "4" and rollouts[4].meta == {"level": 3}
    assert [rollout.opening[0]["content"] for rollout in rollouts[::2]] == ["All.", "All.", "All.", "Own."]
    assert list(rollouts[6].steps[0].messages) == conversation
    rollouts[4].meta["level"] = 4
    assert rollouts[5].meta == {"level": 3}, "copies share nothing"


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("one text", "list of prompts"),
        ([], "no prompts"),
        (["good", ""], "Prompt 1 .* empty"),
        (["good", 5], "Prompt 1"),
        ([{"question": "a"}], "no entry prompt, but question"),
        (["half \ud800"], "half of a character"),
        ([[{"role": "assistant", "content": "a"}]], "must be the user's"),
        ([[{"role": "user"}]], "is no message"),
        ([[{"role": "boss", "content": "a"}]], "is no message"),
        ([[{"role": role, "content": "a"} for role in ("user", "system", "user")]], "only its first message"),
    ],
)
def test_malformed_prompts_are_refused_before_anything_is_asked(prompts, words: str) -> None:
    engine = ScriptedChat(echo)
    with pytest.raises(DataError, match=words):
        play(engine, prompts)
    assert not engine.calls


# Steps ---------------------------------------------------------------------------------------------------------------


def test_every_step_is_kept() -> None:
    engine = ScriptedChat(echo)
    (rollout,) = play(engine, ["first"], always, max_steps=3)
    assert [(step.index, step.prompt, step.thought, step.content) for step in rollout.steps] == [
        (0, "first", "hm 1", "You said: first"),
        (1, "question 1", "hm 3", "You said: question 1"),
        (2, "question 2", "hm 5", "You said: question 2"),
    ]
    assert all(step.started <= step.finished for step in rollout.steps)
    assert [step.seed for step in rollout.steps] == [sampling.seed for _, sampling in engine.calls]
    assert rollout.messages(thoughts=True)[1]["content"] == "<think>hm 1</think>You said: first"
    assert rollout.messages()[1]["content"] == "You said: first"


def seeds(prompts, seed: int) -> list[list[int]]:
    rollouts = play(ScriptedChat(echo), prompts, always, copies=2, max_steps=2, seed=seed)
    return [[step.seed for step in rollout.steps] for rollout in rollouts]


def test_seeds_depend_on_seed_prompt_copy_and_step_and_nothing_else() -> None:
    first = seeds(["a", "b", "a"], 1)
    distinct = {seed for rollout in first for seed in rollout}
    assert len(distinct) == 12, "equal prompts are told apart, too"
    assert seeds(["a", "b", "a"], 1) == first
    assert seeds(["b", "a"], 1) == [first[2], first[3], first[0], first[1]]
    assert not distinct & {seed for rollout in seeds(["a", "b", "a"], 2) for seed in rollout}
    assert derive_seed(1, "a", 0, 2) == 1269459382, "on every machine"


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "functions", "end", "steps"),
    [
        ("a", {}, End("terminated", "one step"), 1),
        ("long", {}, End("truncated", "max_tokens"), 1),
        ("a", {"next_prompt": lambda rollout, step: None}, End("terminated", "no next prompt"), 1),
        ("a", {"next_prompt": always}, End("truncated", "max_steps"), 2),
        ("a", {"next_prompt": always, "stop": lambda rollout, last: True}, End("terminated", "stop"), 1),
        (
            "a",
            {"next_prompt": always, "stop": lambda rollout, last: "solved" if last.index else None},
            End("terminated", "stop", "solved"),
            2,
        ),
    ],
)
def test_ends_are_told_apart(prompt: str, functions: dict, end: End, steps: int) -> None:
    engine = ScriptedChat(lambda messages: "cut…" if messages[-1]["content"] == "long" else "whole")
    (rollout,) = play(engine, [prompt], **functions, max_steps=2)
    assert (rollout.end, len(rollout.steps)) == (end, steps)
    assert rollout.unanswered == ("question 2" if end.reason == "max_steps" else None)


def test_a_full_context_truncates_one_rollout() -> None:
    engine = ScriptedChat(lambda messages: ContextOverflow("full") if len(messages) > 3 else "yes")
    long, short = play(engine, ["a", "b"], lambda rollout, n: always(rollout, n) if rollout.prompt_index == 0 else None)
    assert (long.end, long.unanswered) == (End("truncated", "context full", "full"), "question 2")
    assert len(long.steps) == 2 and short.terminated


def test_a_failed_request_fails_one_rollout_and_a_dead_engine_all() -> None:
    def answers(messages):
        return ValueError("boom") if messages[-1]["content"] == "bad" else "yes"

    bad, good = play(ScriptedChat(answers), ["bad", "good"], reward=lambda r: 1.0 if r.terminated else None)
    assert bad.end == End("failed", "error", "ValueError: boom") and bad.failed and bad.reward is None
    assert good.terminated and good.reward == 1.0
    with pytest.raises(RolloutsStopped, match="rollout 0-0 at step 0: EngineFailure: it died") as stopped:
        play(ScriptedChat(answers, alive=EngineFailure("it died")), ["bad", "good"])
    assert isinstance(stopped.value.__cause__, EngineFailure)
    with pytest.raises(RolloutsStopped, match="wrong key"):
        play(ScriptedChat(lambda messages: ProviderFailure("wrong key")), ["a"])


def test_a_log_prob_that_is_no_number_fails_its_rollout(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: "yes")
    sample = engine.generate

    async def broken(prompt_ids, sampling) -> Completion:
        answer = await sample(prompt_ids, sampling)
        return replace(answer, logprobs=(float("nan"), *answer.logprobs[1:]))

    engine.generate = broken
    (rollout,) = play(engine, ["a"])
    assert rollout.failed and "NaN" in rollout.end.detail


# The user's functions ------------------------------------------------------------------------------------------------


def test_functions_may_be_async_and_keep_notes() -> None:
    async def next_prompt(rollout, step: int) -> str | None:
        await asyncio.sleep(0)
        rollout.notes["asked"] = step
        return "again" if step < 3 else None

    async def stop(rollout, last) -> bool:
        assert last is rollout.steps[-1]
        return False

    async def reward(rollout) -> float:
        assert rollout.end is not None
        return float(rollout.notes["asked"])

    (rollout,) = play(ScriptedChat(echo), ["a"], next_prompt, stop, reward)
    assert rollout.reward == 3.0 and rollout.notes == {"asked": 3} and len(rollout.steps) == 3


def fails(*_) -> None:
    raise KeyError("no such board")


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"next_prompt": fails}, "next_prompt raised an error in rollout .-. at step 1: KeyError"),
        ({"stop": fails}, "stop raised an error .* step 1: KeyError"),
        ({"reward": fails}, "reward raised an error .* step 1: KeyError"),
        ({"next_prompt": lambda rollout, step: 5}, "next_prompt gave no prompt: it is 5"),
        ({"next_prompt": lambda rollout, step: " "}, "next_prompt gave no prompt: it is empty; None ends the rollout"),
        ({"stop": lambda rollout, last: 0.5}, "stop returned 0.5"),
        ({"reward": lambda rollout: "good"}, "reward gave no reward: a reward is a number"),
    ],
)
def test_a_function_that_fails_is_named_with_rollout_and_step(functions: dict, words: str) -> None:
    with pytest.raises(RolloutsStopped, match=words) as stopped:
        play(ScriptedChat(echo), ["a", "b"], **functions)
    assert stopped.value.step == 1 and stopped.value.rollout_id in ("0-0", "1-0")
