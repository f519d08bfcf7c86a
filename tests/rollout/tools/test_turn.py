"""A message with calls of tools: which tokens were sampled and which were given, its limits, and that nothing gets lost
however a model writes its calls."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import ReplyFrame
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tools.formats import CLOSE, OPEN, ToolFrame
from classroom_rl.rollout.tools.tool import ERRORS, Tool, Toolbox, ToolLimits, tool
from classroom_rl.rollout.tools.turn import SampledMessage, chat_with_tools, sample_with_tools
from tests.rollout.test_chat_template import CHATML, make_tokenizer
from tests.rollout.test_shipped_chat_templates import system, tokenizer_for
from tests.support.scripted_engine import ScriptedEngine

SAMPLING = Sampling(1.0, max_tokens=2000, seed=7, draw=("conversation", 3))
LIMITS = ToolLimits(calls=3, seconds=30, characters=500)


@tool
def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


@tool
def spell(count: int) -> str:
    """Spells."""
    return "abc def " * count


def call(name: str = "add", **arguments: Any) -> str:
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CLOSE}"


class Lines(ScriptedEngine):
    """An engine that writes these lines one after the other, and the last one again and again."""

    def __init__(self, tokenizer: Any, *lines: str):
        left = list(lines)
        super().__init__(tokenizer, lambda _: left.pop(0) if len(left) > 1 else left[0])


class TextLines:
    """The same for a model without tokens."""

    def __init__(self, *lines: str, tokens: int = 5):
        self.left, self.tokens, self.calls = list(lines), tokens, []

    async def chat(self, messages: Sequence[dict[str, str]], sampling: Sampling) -> Completion:
        self.calls.append((list(messages), sampling))
        line = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return Completion((), (), line, True, PolicyVersion(), counted=self.tokens, weights="text")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(CHATML)


def write(engine: Lines, *tools: Tool, room: int = 5000, sampling: Sampling = SAMPLING, **more: Any) -> SampledMessage:
    limits = more.pop("limits", LIMITS)
    box = Toolbox(tools or (add, spell), limits)
    frame = ToolFrame(engine.tokenizer, engine.frame, box.schemas())
    context = frame.encode_chat([system("Teach.")])
    message = asyncio.run(sample_with_tools(engine, frame, context, sampling, box, room, **more))
    check_tokens(engine, context, message, sampling, room)
    return message


def check_tokens(
    engine: ScriptedEngine, context: list[int], message: SampledMessage, sampling: Sampling, room: int
) -> None:
    """Sampled tokens are those of the engine, with its log-probs; each answer was sampled after all that is before it
    in the message; given tokens are in no loss; and the limits hold."""
    assert len(message.ids) == len(message.mask) == len(message.logprobs)
    position = 0
    for prompt, call_sampling, answer in engine.calls:
        while position < len(message.ids) and not message.mask[position]:
            assert message.logprobs[position] == 0.0
            position += 1
        assert prompt == [*context, *message.ids[:position]] and call_sampling.max_tokens >= 1
        end = position + len(answer.ids)
        assert message.ids[position:end] == answer.ids and message.logprobs[position:end] == answer.logprobs
        assert set(message.mask[position:end]) == {1}
        position = end
    assert position == len(message.ids), "a message ends with what was sampled"
    assert message.sampled == sum(message.mask) <= sampling.max_tokens and len(message.ids) <= room
    assert message.answers == tuple(answer for _, _, answer in engine.calls)


def given(tokenizer: Any, message: SampledMessage) -> str:
    """What the message holds that was not sampled."""
    return tokenizer.decode([token for token, bit in zip(message.ids, message.mask, strict=True) if not bit])


# The loop ------------------------------------------------------------------------------------------------------------


def test_a_message_without_calls_is_the_engine_s_answer(tokenizer) -> None:
    engine = Lines(tokenizer, "<think>hm</think>Hello.")
    message = write(engine)
    ((_, sampling, answer),) = engine.calls
    assert sampling == SAMPLING and message.ids == answer.ids and set(message.mask) == {1}
    assert (message.text, message.calls, message.ended) == (answer.text, (), True)


def test_calls_are_run_and_their_results_are_read(tokenizer) -> None:
    engine = Lines(tokenizer, f"Let me see.{call(a=2, b=3)}{call(a=5)}", "<think>5, 6</think>It is 5.")
    message = write(engine)
    assert message.text == "Let me see.\n\n<think>5, 6</think>It is 5."
    first, second = message.calls
    assert (first.result, second.result) == ("5", "6") and first.arguments == {"a": 2, "b": 3}
    assert (first.at, second.at, first.segment, second.segment) == (11, 11, 0, 0)
    assert (first.id, second.id) == ("conversation:3:0", "conversation:3:1")
    assert given(tokenizer, message) == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def samplings_of(tokenizer, sampling: Sampling) -> list[Sampling]:
    """How the three answers of a message with two calls are sampled."""
    engine = Lines(tokenizer, call(a=1), call(a=2), "Done.")
    write(engine, sampling=sampling)
    return [call_sampling for _, call_sampling, _ in engine.calls]


def test_every_segment_has_a_seed_and_a_draw_of_its_own(tokenizer) -> None:
    samplings = samplings_of(tokenizer, SAMPLING)
    assert samplings[0].seed == 7 and len({sampling.seed for sampling in samplings}) == 3
    draws = [sampling.draw for sampling in samplings]
    assert draws == [SAMPLING.draw, *((*SAMPLING.draw, "segment", number) for number in (1, 2))]
    assert samplings_of(tokenizer, SAMPLING) == samplings
    free = replace(SAMPLING, seed=None, draw=())
    assert {sampling.seed for sampling in samplings_of(tokenizer, free)} == {None}
    assert len(write(Lines(tokenizer, call(a=1), "Done."), sampling=free).calls[0].id) == 32


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_with_a_template_that_knows_tools(name: str) -> None:
    tokenizer = tokenizer_for(name)
    call_text = call(a=2) if name == "qwen3" else '{"name": "add", "parameters": {"a": 2}}'
    message = write(Lines(tokenizer, call_text, "It is 3."))
    assert message.calls[0].result == "3" and message.text == "It is 3."


def test_llama_s_end_of_a_call_gets_no_second_end() -> None:
    tokenizer = tokenizer_for("llama3_1")
    engine = Lines(tokenizer, '{"name": "add", "parameters": {"a": 2}}', "It is 3.")
    eom = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    original = engine.generate

    async def ends_with_eom(prompt_ids, sampling):
        answer = await original(prompt_ids, sampling)
        if len(engine.calls) == 1:
            answer = replace(answer, ids=(*answer.ids[:-1], eom))
            engine.calls[-1] = (*engine.calls[-1][:2], answer)
        return answer

    engine.generate = ends_with_eom
    message = write(engine)
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    position = message.mask.index(0)
    assert message.ids[position - 1] == eom and message.ids[position] != end


def test_a_thought_that_the_template_opens_holds_no_call() -> None:
    tokenizer = tokenizer_for("deepseek_r1_distill")
    assert ReplyFrame(tokenizer).opens_thought
    engine = Lines(tokenizer, f"{call(a=1)}</think>So.{call(a=2)}", f"{call(a=3)} hm</think>It is 3.")
    message = write(engine)
    assert [tool_call.arguments for tool_call in message.calls] == [{"a": 2}]
    assert message.text == f"{call(a=1)}</think>So.\n\n<think>\n{call(a=3)} hm</think>It is 3."
    assert visible_text(f"<think>\n{message.text}") == "So.\n\nIt is 3."
    opened = write(Lines(tokenizer, f"x</think>So.{call(a=2)}", "y</think>Well."), opened="<think>\n")
    assert opened.text == "<think>\nx</think>So.\n\n<think>\ny</think>Well."
    assert opened.text[: opened.calls[0].at] == "<think>\nx</think>So."
    endless = write(Lines(tokenizer, f"hm {call(a=1)}"))
    assert endless.calls == () and len(endless.answers) == 1


# Limits --------------------------------------------------------------------------------------------------------------


def test_calls_above_the_limit_are_told_once_and_recorded_all(tokenizer) -> None:
    engine = Lines(tokenizer, call(a=1) * 5, f"Hm.{call(a=9)}")
    message = write(engine)
    assert [tool_call.error for tool_call in message.calls] == [None] * 3 + ["limit"] * 3
    assert [tool_call.result for tool_call in message.calls[:3]] == ["2"] * 3 and len(message.answers) == 2
    assert given(tokenizer, message).count("no more tools may be called") == 1 and message.text == "Hm."
    assert "no more tools may be called" in message.calls[-1].result


def test_a_model_that_calls_for_ever_is_stopped(tokenizer) -> None:
    message = write(Lines(tokenizer, call(a=1)))
    assert len(message.answers) == 5 and [tool_call.error for tool_call in message.calls] == [None] * 3 + ["limit"] * 2
    broken = write(Lines(tokenizer, f"{OPEN}x{CLOSE}"))
    assert [tool_call.error for tool_call in broken.calls] == ["bad_json"] * 3 + ["limit", "bad_json"]


@pytest.mark.parametrize("room", [40, 200, 5000])
def test_the_budget_is_that_of_the_whole_message(tokenizer, room: int) -> None:
    engine = Lines(tokenizer, f"So. {call(a=1)}", "so " * 400)
    message = write(engine, room=room, sampling=replace(SAMPLING, max_tokens=150))
    assert not message.ended
    if room == 5000:
        assert message.sampled == 150 and message.calls[0].result == "2"


@pytest.mark.parametrize("room", [*range(30, 420, 13), 5000])
def test_long_results_are_cut_to_the_room_that_is_left(tokenizer, room: int) -> None:
    engine = Lines(tokenizer, call("spell", count=200), "ok " * 1000)
    message = write(engine, room=room, limits=replace(LIMITS, characters=10_000))
    (tool_call,) = message.calls
    if tool_call.error == "limit":
        assert len(message.answers) == 1 and room < 200
        return
    assert len(message.answers) == 2 and tool_call.error is None
    assert f"<tool_response>\n{tool_call.result}\n</tool_response>" in given(tokenizer, message), (
        "what is recorded is what it was shown"
    )
    assert (room == 5000) == (tool_call.result == "abc def " * 200)
    if room < 5000:
        assert "(cut: it has 1600 characters)" in tool_call.result or "no room" in tool_call.result


def test_a_cut_call_is_recorded_and_not_run(tokenizer) -> None:
    ran = []

    @tool
    def watched(a: int) -> int:
        """Watches."""
        ran.append(a)
        return a

    line = f"So. {call('watched', a=1)}{call('watched', a=2)}"
    length = len(tokenizer.encode(line, add_special_tokens=False)) + 1
    for tokens in range(1, length):
        engine = Lines(tokenizer, line, "Done.")
        message = write(engine, watched, sampling=replace(SAMPLING, max_tokens=tokens))
        assert not message.ended and ran == [] and len(message.answers) == 1
        assert {tool_call.error for tool_call in message.calls} <= {"limit"}
        assert (OPEN in engine.calls[0][2].text) == bool(message.calls)
    write(Lines(tokenizer, line, "Done."), watched)
    assert ran == [1, 2]


# Text ----------------------------------------------------------------------------------------------------------------


def test_a_model_behind_an_api_gets_tools_and_results_as_text() -> None:
    engine = TextLines(f"<think>{call(a=7)}</think>So.{call(a=2)}", "It is 3.")
    message = asyncio.run(chat_with_tools(engine, [system("Teach.")], SAMPLING, Toolbox([add], LIMITS)))
    (first, _), (second, later_sampling) = engine.calls
    assert len(first) == 1 and first[0]["content"].startswith("Teach.\n\n# Tools") and "Adds." in first[0]["content"]
    assert second[1:] == [
        {"role": "assistant", "content": f"<think>{call(a=7)}</think>So.{call(a=2)}"},
        {"role": "user", "content": "<tool_response>\n3\n</tool_response>"},
    ]
    assert message.text == f"<think>{call(a=7)}</think>So.\n\nIt is 3." and message.ids == message.logprobs == ()
    assert (
        message.sampled == 10
        and later_sampling.max_tokens == SAMPLING.max_tokens - 5
        and later_sampling.seed != SAMPLING.seed
    )


@pytest.mark.parametrize("tokens", [0, 900])
def test_a_model_behind_an_api_has_the_same_limits(tokens: int) -> None:
    engine = TextLines(call(a=1), tokens=tokens)
    message = asyncio.run(chat_with_tools(engine, [system("Teach.")], SAMPLING, Toolbox([add], LIMITS)))
    assert len(message.answers) == (3 if tokens else 5), "2000 tokens in all"
    assert message.calls[-1].error == "limit" and all(
        call_sampling.max_tokens >= 1 for _, call_sampling in engine.calls
    )


def test_calls_in_a_message_that_was_cut_are_not_run() -> None:
    """An API may cut a message before its limit."""
    engine = TextLines(f"So. {call(a=1)} and")
    original_chat = engine.chat

    async def cut(messages: Sequence[dict[str, str]], sampling: Sampling) -> Completion:
        return replace(await original_chat(messages, sampling), ended=False)

    engine.chat = cut
    message = asyncio.run(chat_with_tools(engine, [system("Teach.")], SAMPLING, Toolbox([add], LIMITS)))
    assert len(message.answers) == 1 and message.calls[0].error == "limit" and not message.ended


# Any messages --------------------------------------------------------------------------------------------------------

RAN: list[str] = []


@tool
def listed(word: str, count: int = 1, numbers: list[float] | None = None) -> str:
    """Is listed."""
    RAN.append("listed")
    return f"{word}{CLOSE}{OPEN}<|im_end|></tool_response>"


@tool
def explodes(word: str) -> str:
    """Explodes."""
    RAN.append("explodes")
    raise RuntimeError(word)


def raw(arguments: str) -> str:
    return f'{OPEN}{{"name": "listed", "arguments": {arguments}}}{CLOSE}'


OUTCOMES: list[tuple[str, str | None]] = [
    *(
        (call("listed", word=word), None)
        for word in ("é漢", '\\"', "x" * 300, "</tool_response><|im_end|>", CLOSE + OPEN)
    ),
    (call("listed", word="a", count=-(10**18)), None),
    (call("listed", word=3), "bad_arguments"),
    (call("listed", word="a", count=10**30 + 0.5), "bad_arguments"),
    (call("listed", word="a", numbers="all"), "bad_arguments"),
    (call("listed", word="a", extra=True), "bad_arguments"),
    (call("listed"), "bad_arguments"),
    (raw("[" * 40 + "]" * 40), "bad_arguments"),
    (raw('{"word": ' + "9" * 5000 + "}"), "bad_json"),
    (raw('{"word": -Infinity}'), "bad_json"),
    (raw('{"word": "a"'), "bad_json"),
    (f"{OPEN}listed('a'){CLOSE}", "bad_json"),
    (f"{OPEN}{call('listed', word='a')}{CLOSE}", "bad_json"),
    (CLOSE, "bad_json"),
    *((call(name, word="ls"), "unknown_tool") for name in ("os.system", "eval", "Listed", "listed ")),
    (call("explodes", word="a"), "exception"),
]
"""Calls as models write them, and the error of each."""


def any_messages(count: int) -> Iterator[tuple[str, list[str | None]]]:
    """Messages with random calls, and the errors of these. Some have calls in thoughts besides, which are none."""
    rng = random.Random(11)
    for _ in range(count):
        calls = rng.choices(OUTCOMES, k=rng.randrange(1, 12))
        hidden = "".join(text for text, _ in rng.choices(OUTCOMES, k=2))
        before = rng.choice(["", "Well. ", f"<think>{hidden}</think>", f"{hidden}</think>"])
        after = rng.choice(["", " So.", f"<think>{hidden}"])
        yield before + rng.choice(["", " "]).join(text for text, _ in calls) + after, [error for _, error in calls]


def test_whatever_a_model_writes_nothing_unlisted_runs_and_no_call_is_dropped() -> None:
    RAN.clear()
    box = Toolbox([listed, explodes], ToolLimits(calls=20, seconds=60, characters=200))
    expected: Counter[str | None] = Counter()
    for text, errors in any_messages(400):
        engine = TextLines(text, "Done.")
        message = asyncio.run(chat_with_tools(engine, [system("Teach.")], SAMPLING, box))
        assert [tool_call.error for tool_call in message.calls] == errors and len(message.answers) == 2
        assert all(0 < len(tool_call.result) < 300 for tool_call in message.calls)
        assert message.text.endswith("Done.") or "<think>" in message.text
        json.dumps([tool_call.arguments for tool_call in message.calls], ensure_ascii=False).encode()
        expected.update(errors)
    assert Counter(RAN) == {"listed": expected[None], "explodes": expected["exception"]}
    assert set(expected) == {None, *ERRORS} - {"limit", "timeout"}


def test_whatever_a_model_with_tokens_writes_every_token_is_where_it_belongs(tokenizer) -> None:
    rng = random.Random(3)
    for text, errors in any_messages(60):
        room = rng.choice([20, 100, 400, 5000])
        message = write(Lines(tokenizer, text, "Done."), listed, explodes, room=room, limits=replace(LIMITS, calls=20))
        if room == 5000 and message.answers[0].ended:
            assert [tool_call.error for tool_call in message.calls] == errors
