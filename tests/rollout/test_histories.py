"""What the model sees at each step: with or without its thoughts, as tokens or as messages, with tools."""

import pytest

from classroom_rl import ToolLimits, calculator
from tests.support.played_rollouts import always, echo, play
from tests.support.scripted_chat import ScriptedChat
from tests.support.scripted_engine import ScriptedEngine

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def asks_the_calculator(prompt: str) -> str:
    """Calls the calculator first, and answers once its result is the last that it sees."""
    return "It is 42." if prompt.rstrip().rpartition("user")[2].count("<tool_response>") else f"Let me see. {CALL}"


@pytest.mark.parametrize("history", ["with_thinking", "without_thinking"])
def test_the_model_sees_its_thoughts_only_if_asked(history: str) -> None:
    engine = ScriptedChat(echo)
    (rollout,) = play(engine, ["first"], always, max_steps=3, history=history, system="Be brief.")
    thought = "<think>hm 2</think>" if history == "with_thinking" else ""
    assert engine.calls[1][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": f"{thought}You said: first"},
        {"role": "user", "content": "question 1"},
    ]
    assert [list(step.messages) for step in rollout.steps] == [messages for messages, _ in engine.calls]


def test_a_history_with_thoughts_continues_the_tokens_that_were_sampled(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: f"<think>so {prompt.count('user')}</think>Number 7.")
    (rollout,) = play(engine, ["Say a number."], always, max_steps=3, history="with_thinking")
    for before, step in zip(rollout.steps, rollout.steps[1:], strict=False):
        assert step.prompt_ids == (*before.prompt_ids, *before.ids, *engine.frame.reply(step.prompt))
    assert [list(step.prompt_ids) for step in rollout.steps] == [prompt for prompt, _, _ in engine.calls]


def test_a_cut_message_is_closed_before_the_next_prompt(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: "one two three four five six seven eight")
    (rollout,) = play(engine, ["Go."], always, max_steps=2, history="with_thinking", max_tokens=3)
    first, second = rollout.steps
    assert first.finish_reason == "length" and first.cut and len(first.ids) == 3
    added_ids = second.prompt_ids[len(first.prompt_ids) + 3 :]
    assert added_ids == (engine.frame.turn_end_id, *engine.frame.reply("question 1"))


@pytest.mark.parametrize("history", ["with_thinking", "without_thinking"])
def test_a_step_holds_its_calls_and_their_results_are_not_trained_on(history: str, tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, asks_the_calculator)
    options = {"max_steps": 2, "history": history, "max_tokens": 200, "tools": [calculator]}
    rollouts = play(engine, ["What is 6*7?"], always, **options)
    for step in rollouts[0].steps:
        (call,) = step.tool_calls
        assert (call.name, call.arguments, call.result, call.error) == ("calculator", {"expression": "6*7"}, "42", None)
        assert step.content == "Let me see. It is 42."
        given_ids = [token for token, bit in zip(step.ids, step.mask, strict=True) if not bit]
        assert "42" in tiny_tokenizer.decode(given_ids) and "6*7" not in tiny_tokenizer.decode(given_ids)
        assert step.tokens == sum(step.mask) < len(step.ids)
        assert all(logprob == 0 for logprob, bit in zip(step.logprobs, step.mask, strict=True) if not bit)
    sampled = [token for row in rollouts.rows() for token, bit in zip(row.completion_ids, row.mask, strict=True) if bit]
    assert sampled == [token for _, _, answer in engine.calls for token in answer.ids]
    assert "calculator" in tiny_tokenizer.decode(rollouts[0].steps[0].prompt_ids), "the prompt lists the tools"


def test_a_model_without_tokens_calls_tools_in_words() -> None:
    engine = ScriptedChat(lambda messages: asks_the_calculator(f"user {messages[-1]['content']}"))
    (rollout,) = play(engine, ["What is 6*7?"], tools=[calculator])
    (call,) = rollout.last.tool_calls
    assert call.result == "42" and rollout.last.content.endswith("It is 42.") and rollout.last.ids == ()
    assert "calculator" in engine.calls[0][0][0]["content"] and "42" in engine.calls[1][0][-1]["content"]


def test_calls_above_the_limit_are_refused_and_recorded(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: CALL)
    (rollout,) = play(engine, ["Go on."], max_tokens=400, tools=[calculator], tool_limits=ToolLimits(calls=2))
    assert [call.error for call in rollout.last.tool_calls][:3] == [None, None, "limit"]
