"""Rollouts on engines that follow a script: what is asked, what is kept, how rollouts end, and what stops them."""

import asyncio
from dataclasses import replace

import pytest

from classroom_rl import Rollouts, RolloutSet, ToolLimits, calculator
from classroom_rl.errors import (
    ConfigError,
    ContextOverflow,
    DataError,
    EngineFailure,
    ProviderFailure,
    RolloutsStopped,
)
from classroom_rl.rollout.engine import Completion
from classroom_rl.rollout.player import derive_seed
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.step import End
from tests.support.scripted_chat import ScriptedChat
from tests.support.scripted_engine import ScriptedEngine


def run(runner: Rollouts, prompts, **options) -> RolloutSet:
    return asyncio.run(runner.run(prompts, progress=False, **options))


def echo(messages) -> str:
    return f"<think>hm {len(messages)}</think>You said: {messages[-1]['content']}"


def always(_rollout, step: int) -> str:
    return f"question {step}"


# What is asked and kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", ["with_thinking", "without_thinking"])
def test_every_step_is_kept_and_the_model_sees_its_thoughts_only_if_asked(history: str) -> None:
    engine = ScriptedChat(echo)
    runner = Rollouts(engine, max_steps=3, history=history, system="Be brief.", seed=5)
    (rollout,) = run(runner, ["first"], next_prompt=always)
    assert [step.prompt for step in rollout.steps] == ["first", "question 1", "question 2"]
    assert [step.content for step in rollout.steps] == [
        "You said: first",
        "You said: question 1",
        "You said: question 2",
    ]
    assert [step.thought for step in rollout.steps] == ["hm 2", "hm 4", "hm 6"]
    assert [step.index for step in rollout.steps] == [0, 1, 2]
    assert all(step.started <= step.finished for step in rollout.steps)
    thought = "<think>hm 2</think>" if history == "with_thinking" else ""
    assert engine.calls[1][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": f"{thought}You said: first"},
        {"role": "user", "content": "question 1"},
    ]
    assert [list(step.messages) for step in rollout.steps] == [messages for messages, _ in engine.calls]
    assert [step.seed for step in rollout.steps] == [sampling.seed for _, sampling in engine.calls]
    assert len({step.seed for step in rollout.steps}) == 3
    assert rollout.messages(thoughts=True)[2]["content"] == "<think>hm 2</think>You said: first"
    assert rollout.messages()[2]["content"] == "You said: first"


def test_tokens_of_a_history_with_thoughts_are_those_that_were_sampled(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: f"<think>so {prompt.count('user')}</think>Number 7.")
    runner = Rollouts(engine, max_steps=3, history="with_thinking")
    done = run(runner, ["Say a number."], next_prompt=always)
    (rollout,) = done
    for before, step in zip(rollout.steps, rollout.steps[1:], strict=False):
        whole = before.prompt_ids + before.ids
        assert step.prompt_ids[: len(whole)] == whole
        assert step.prompt_ids[len(whole) :] == tuple(engine.frame.reply(step.prompt))
    assert [list(step.prompt_ids) for step in rollout.steps] == [prompt for prompt, _, _ in engine.calls]
    (row,) = done.rows()
    assert row.prompt_ids == list(rollout.steps[0].prompt_ids)
    assert row.prompt_ids + row.completion_ids == [*rollout.steps[-1].prompt_ids, *rollout.steps[-1].ids]
    sampled = [token for token, mask in zip(row.completion_ids, row.mask, strict=True) if mask]
    assert sampled == [token for step in rollout.steps for token in step.ids]
    given = [logprob for logprob, mask in zip(row.logprobs, row.mask, strict=True) if mask]
    assert given == [logprob for step in rollout.steps for logprob in step.logprobs]
    assert [n for n, mask in zip(row.messages, row.mask, strict=True) if mask] == [
        step.index for step in rollout.steps for _ in step.ids
    ]
    assert all(logprob == 0 for logprob, mask in zip(row.logprobs, row.mask, strict=True) if not mask)


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def asks_the_calculator(prompt: str) -> str:
    """Calls the calculator first, and answers once its result is the last that it sees."""
    return "It is 42." if prompt.rstrip().rpartition("user")[2].count("<tool_response>") else f"Let me see. {CALL}"


@pytest.mark.parametrize("history", ["with_thinking", "without_thinking"])
def test_a_step_holds_its_calls_and_their_results_are_not_trained_on(history: str, tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, asks_the_calculator)
    runner = Rollouts(engine, max_steps=2, history=history, max_tokens=200, tools=[calculator])
    done = run(runner, ["What is 6*7?"], next_prompt=always)
    (rollout,) = done
    for step in rollout.steps:
        (call,) = step.tool_calls
        assert (call.name, call.arguments, call.result, call.error) == ("calculator", {"expression": "6*7"}, "42", None)
        assert step.content == "Let me see. It is 42."
        given = [token for token, sampled in zip(step.ids, step.mask, strict=True) if not sampled]
        assert "42" in tiny_tokenizer.decode(given) and "6*7" not in tiny_tokenizer.decode(given)
        sampled = [token for token, sampled in zip(step.ids, step.mask, strict=True) if sampled]
        assert step.tokens == len(sampled) < len(step.ids)
        assert all(logprob == 0 for logprob, sampled in zip(step.logprobs, step.mask, strict=True) if not sampled)
    sampled = [token for row in done.rows() for token, mask in zip(row.completion_ids, row.mask, strict=True) if mask]
    assert sampled == [token for _, _, answer in engine.calls for token in answer.ids]
    assert "calculator" in tiny_tokenizer.decode(rollout.steps[0].prompt_ids), "the prompt lists the tools"


def test_a_model_without_tokens_calls_tools_in_words() -> None:
    engine = ScriptedChat(lambda messages: asks_the_calculator(f"user {messages[-1]['content']}"))
    (rollout,) = run(Rollouts(engine, tools=[calculator]), ["What is 6*7?"])
    (call,) = rollout.last.tool_calls
    assert call.result == "42" and rollout.last.content.endswith("It is 42.") and rollout.last.ids == ()
    assert "calculator" in engine.calls[0][0][0]["content"] and "42" in engine.calls[1][0][-1]["content"]


def test_calls_above_the_limit_are_refused_and_recorded(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: CALL)
    runner = Rollouts(engine, max_tokens=400, tools=[calculator], tool_limits=ToolLimits(calls=2))
    (rollout,) = run(runner, ["Go on."])
    assert [call.error for call in rollout.last.tool_calls][:3] == [None, None, "limit"]


@pytest.mark.parametrize("tools", [[len], [calculator, calculator], [lambda x: x]])
def test_what_is_no_tool_is_refused(tools) -> None:
    with pytest.raises(ConfigError):
        Rollouts(ScriptedChat(echo), tools=tools)


def test_a_cut_message_is_closed_before_the_next_prompt(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: "one two three four five six seven eight")
    (rollout,) = run(Rollouts(engine, max_steps=2, history="with_thinking", max_tokens=3), ["Go."], next_prompt=always)
    first, second = rollout.steps
    assert first.finish_reason == "length" and first.cut and len(first.ids) == 3
    glue = second.prompt_ids[len(first.prompt_ids) + 3 :]
    assert glue == (engine.frame.turn_end_id, *engine.frame.reply("question 1"))


def test_without_thoughts_each_step_is_a_row_with_a_prompt_of_its_own(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: "<think>secret</think>Number 7.")
    done = run(
        Rollouts(engine, max_steps=2), ["Say a number."], next_prompt=always, reward=lambda r: [0.25, None], copies=2
    )
    rows = done.rows()
    assert [(row.conversation_id, row.message, row.reward) for row in rows] == [
        ("0-0", 0, 0.25),
        ("0-0", 1, None),
        ("0-1", 0, 0.25),
        ("0-1", 1, None),
    ]
    seen = tiny_tokenizer.decode(rows[1].prompt_ids)
    assert "Number 7." in seen and "secret" not in seen
    assert all(row.mask == [1] * len(row.completion_ids) and not any(row.target) for row in rows)
    assert done[0].reward == 0.25 and done[0].step_rewards == (0.25, None)


def test_rows_need_tokens() -> None:
    with pytest.raises(DataError, match="ScriptedChat gives text alone"):
        run(Rollouts(ScriptedChat(echo)), ["a"]).rows()


def test_prompts_come_as_text_problems_entries_and_messages() -> None:
    engine = ScriptedChat(lambda messages: "yes")
    conversation = [
        {"role": "system", "content": "Own."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompts = ["text", Problem.of("2 + 2?", "4"), {"prompt": "entry", "level": 3}, conversation]
    done = run(Rollouts(engine, system="All."), prompts, copies=2)
    assert [(each.id, each.prompt_index, each.copy) for each in done][:3] == [
        ("0-0", 0, 0),
        ("0-1", 0, 1),
        ("1-0", 1, 0),
    ]
    assert [each.first_prompt for each in done[::2]] == ["text", "2 + 2?", "entry", "c"]
    assert done[2].meta["answer"] == "4" and done[4].meta == {"level": 3}
    assert [each.opening[0]["content"] for each in done[::2]] == ["All.", "All.", "All.", "Own."]
    assert list(done[6].steps[0].messages) == conversation
    done[4].meta["level"] = 4
    assert done[5].meta == {"level": 3}, "copies share nothing"


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
    ],
)
def test_malformed_prompts_are_refused_before_anything_is_asked(prompts, words: str) -> None:
    engine = ScriptedChat(echo)
    with pytest.raises(DataError, match=words):
        run(Rollouts(engine), prompts)
    assert not engine.calls


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 0},
        {"history": "all"},
        {"seed": -1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": 0},
        {"max_tokens": 2.5},
        {"concurrency": 0},
    ],
)
def test_settings_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Rollouts(ScriptedChat(echo), **options)


def test_what_is_no_engine_and_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no engine"):
        Rollouts("gpt")
    with pytest.raises(ConfigError, match="stop is 'never'"):
        run(Rollouts(ScriptedChat(echo)), ["a"], stop="never")


# How rollouts end ----------------------------------------------------------------------------------------------------


def test_ends_are_told_apart() -> None:
    engine = ScriptedChat(lambda messages: "cut…" if messages[-1]["content"] == "long" else "whole")
    runner = Rollouts(engine, max_steps=2)
    assert run(runner, ["a"])[0].end == End("terminated", "one step")
    assert run(runner, ["long"])[0].end == End("truncated", "max_tokens")
    assert run(runner, ["a"], next_prompt=lambda r, n: None)[0].end == End("terminated", "no next prompt")
    assert run(runner, ["a"], next_prompt=always, stop=lambda r, last: True)[0].end == End("terminated", "stop")
    reasoned = run(runner, ["a"], next_prompt=always, stop=lambda r, last: "solved" if last.index else None)[0]
    assert (reasoned.end, len(reasoned.steps)) == (End("terminated", "stop", "solved"), 2)


def test_the_last_message_of_a_truncated_rollout_is_not_an_answer() -> None:
    runner = Rollouts(ScriptedChat(lambda messages: "The answer is 4."), max_steps=2)
    (rollout,) = run(runner, ["a"], next_prompt=always)
    assert rollout.end == End("truncated", "max_steps") and rollout.truncated and not rollout.terminated
    assert rollout.answer is None and rollout.unanswered == "question 2" and len(rollout.steps) == 2
    (ended,) = run(runner, ["a"], next_prompt=lambda r, n: "b" if n < 2 else None)
    assert ended.terminated and ended.answer == "The answer is 4."


def test_an_unclosed_thought_is_no_answer() -> None:
    (rollout,) = run(Rollouts(ScriptedChat(lambda messages: "<think>it is 4")), ["a"])
    assert rollout.last.content == "" and rollout.last.thought_state == "cut" and rollout.answer is None


def test_a_full_context_truncates_one_rollout() -> None:
    engine = ScriptedChat(lambda messages: ContextOverflow("full") if len(messages) > 3 else "yes")
    long, short = run(
        Rollouts(engine), ["a", "b"], next_prompt=lambda r, n: always(r, n) if r.prompt_index == 0 else None
    )
    assert (long.end, long.unanswered) == (End("truncated", "context full", "full"), "question 2")
    assert len(long.steps) == 2 and short.terminated


def test_a_failed_request_fails_one_rollout_and_a_dead_engine_all() -> None:
    def answers(messages):
        return ValueError("boom") if messages[-1]["content"] == "bad" else "yes"

    bad, good = run(Rollouts(ScriptedChat(answers)), ["bad", "good"], reward=lambda r: 1.0 if r.terminated else None)
    assert bad.end == End("failed", "error", "ValueError: boom") and bad.failed and bad.reward is None
    assert good.terminated and good.reward == 1.0
    dead = ScriptedChat(answers, alive=EngineFailure("it died"))
    with pytest.raises(RolloutsStopped, match="rollout 0-0 at step 0: EngineFailure: it died") as stopped:
        run(Rollouts(dead), ["bad", "good"])
    assert isinstance(stopped.value.__cause__, EngineFailure)
    with pytest.raises(RolloutsStopped, match="wrong key"):
        run(Rollouts(ScriptedChat(lambda messages: ProviderFailure("wrong key"))), ["a"])


def test_a_log_prob_that_is_no_number_fails_its_rollout(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: "yes")
    sample = engine.generate

    async def broken(prompt_ids, sampling) -> Completion:
        found = await sample(prompt_ids, sampling)
        return replace(found, logprobs=(float("nan"), *found.logprobs[1:]))

    engine.generate = broken
    (rollout,) = run(Rollouts(engine), ["a"])
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

    (rollout,) = run(Rollouts(ScriptedChat(echo)), ["a"], next_prompt=next_prompt, stop=stop, reward=reward)
    assert rollout.reward == 3.0 and rollout.notes == {"asked": 3} and len(rollout.steps) == 3


def fails(*_) -> None:
    raise KeyError("no such board")


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"next_prompt": fails}, "next_prompt raised an error in rollout .-. at step 1: KeyError"),
        ({"stop": fails}, "stop raised an error .* step 1: KeyError"),
        ({"reward": fails}, "reward raised an error .* step 1: KeyError"),
        ({"next_prompt": lambda r, n: 5}, "next_prompt gave no prompt: it is 5"),
        ({"next_prompt": lambda r, n: " "}, "next_prompt gave no prompt: it is empty; None ends the rollout"),
        ({"stop": lambda r, s: 0.5}, "stop returned 0.5"),
        ({"reward": lambda r: "good"}, "reward gave no reward"),
        ({"reward": lambda r: float("nan")}, "reward is nan; it must be finite"),
        ({"reward": lambda r: [1.0, 2.0]}, "2 rewards for 1 steps"),
    ],
)
def test_a_function_that_fails_is_named_with_rollout_and_step(functions: dict, words: str) -> None:
    with pytest.raises(RolloutsStopped, match=words) as stopped:
        run(Rollouts(ScriptedChat(echo)), ["a", "b"], **functions)
    assert stopped.value.step == 1 and stopped.value.rollout_id in ("0-0", "1-0")


def test_what_was_done_before_an_error_is_not_lost() -> None:
    def next_prompt(rollout, step: int) -> str | None:
        if rollout.prompt_index == 0:
            return None
        if step == 4:
            raise RuntimeError("broken")
        return "again"

    runner = Rollouts(ScriptedChat(echo))
    with pytest.raises(RolloutsStopped, match="1 of 2 rollouts had ended") as stopped:
        run(runner, ["a", "b"], next_prompt=next_prompt, reward=lambda r: 1.0)
    finished, broken = stopped.value.done
    assert finished.terminated and finished.reward == 1.0
    assert broken.end is None and len(broken.steps) == 4
    assert runner.so_far == stopped.value.done
    assert "unfinished" in str(stopped.value.done.summary())


def test_what_was_done_before_an_interruption_is_not_lost() -> None:
    async def interrupted() -> RolloutSet:
        runner = Rollouts(ScriptedChat(echo), max_steps=10**6)
        task = asyncio.create_task(runner.run(["a"], next_prompt=always, progress=False))
        while not (runner.so_far and len(runner.so_far[0].steps) > 3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return runner.so_far

    (rollout,) = asyncio.run(interrupted())
    assert rollout.end is None and len(rollout.steps) > 3


# All at once ---------------------------------------------------------------------------------------------------------


def test_no_rollout_waits_for_the_step_of_another_one() -> None:
    """The first message of one rollout comes only after the other one has ended with all its steps."""

    async def both() -> RolloutSet:
        ended = asyncio.Event()

        async def answers(messages) -> str:
            if messages[0]["content"] == "slow":
                await asyncio.wait_for(ended.wait(), 60)
            return "yes"

        def next_prompt(rollout, step: int) -> str | None:
            if step < 5:
                return "again"
            ended.set()
            return None

        return await Rollouts(ScriptedChat(answers)).run(["slow", "fast"], next_prompt=next_prompt, progress=False)

    slow, fast = asyncio.run(both())
    assert len(slow.steps) == len(fast.steps) == 5
    assert fast.steps[-1].finished <= slow.steps[0].finished


def test_no_more_rollouts_than_allowed_are_in_play() -> None:
    now, most = 0, 0

    async def answers(messages) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return "yes"

    done = run(Rollouts(ScriptedChat(answers), concurrency=3), [f"p{n}" for n in range(12)])
    assert (most, len(done)) == (3, 12)
    assert [rollout.first_prompt for rollout in done] == [f"p{n}" for n in range(12)]


def test_the_progress_bar_shows_rollouts_and_steps(capsys) -> None:
    runner = Rollouts(ScriptedChat(echo), max_steps=2)
    asyncio.run(runner.run(["a", "b"], next_prompt=always))
    shown = capsys.readouterr().err
    assert "2/2" in shown and "4 steps" in shown


# Seeds and replay ----------------------------------------------------------------------------------------------------


def seeds(prompts, **options) -> list[list[int]]:
    runner = Rollouts(ScriptedChat(echo), max_steps=2, **options)
    return [[step.seed for step in each.steps] for each in run(runner, prompts, next_prompt=always, copies=2)]


def test_seeds_depend_on_seed_prompt_copy_and_step_and_nothing_else() -> None:
    found = seeds(["a", "b", "a"], seed=1)
    assert len({seed for each in found for seed in each}) == 12, "equal prompts are told apart, too"
    assert seeds(["a", "b", "a"], seed=1) == found
    assert seeds(["b", "a"], seed=1) == [found[2], found[3], found[0], found[1]]
    assert not {seed for each in seeds(["a", "b", "a"], seed=2) for seed in each} & {s for each in found for s in each}
    assert derive_seed(1, "a", 0, 2) == 1269459382, "on every machine"


def test_a_replay_asks_the_same_questions_with_the_same_seeds_and_settings() -> None:
    engine = ScriptedChat(echo)
    runner = Rollouts(engine, max_steps=4, history="with_thinking", temperature=0.5, max_tokens=9)
    done = run(
        runner,
        ["a", "b"],
        next_prompt=always,
        stop=lambda r, last: r.prompt_index == 1 and last.index == 1 and "enough",
        reward=lambda r: 2.0,
    )
    again = asyncio.run(Rollouts(other := ScriptedChat(echo)).replay(done, progress=False))
    assert sorted(map(str, other.calls)) == sorted(map(str, engine.calls))
    timeless = [[replace(step, started=0.0, finished=0.0) for step in each.steps] for each in done]
    assert [[replace(step, started=0.0, finished=0.0) for step in each.steps] for each in again] == timeless
    assert [(each.end, each.unanswered, each.settings) for each in again] == [
        (each.end, each.unanswered, each.settings) for each in done
    ]
    assert [each.reward for each in again] == [None, None]


def test_a_replay_with_functions_is_played_by_them() -> None:
    done = run(Rollouts(ScriptedChat(echo), max_steps=5), ["a"], next_prompt=always)
    done[0].notes["old"] = 1
    runner = Rollouts(ScriptedChat(echo))
    again = asyncio.run(runner.replay(done, next_prompt=lambda r, n: "other" if n < 2 else None, progress=False))
    assert [step.prompt for step in again[0].steps] == ["a", "other"]
    assert again[0].end == End("terminated", "no next prompt") and again[0].notes == {}


def test_a_replay_leaves_rollouts_without_steps_as_they_are() -> None:
    failed = run(Rollouts(ScriptedChat(lambda messages: ValueError("boom"))), ["a"])
    assert asyncio.run(Rollouts(ScriptedChat(echo)).replay(failed, progress=False)) == failed
