"""The teacher's prompt and tools: what it is told and the others hear, and which tokens are not trained on."""

import json
from dataclasses import replace

import pytest

from classroom_rl.config.base import GenerationConfig, ToolLimitsConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import PolicyMismatch
from classroom_rl.rollout.chat_template import ReplyFrame
from classroom_rl.rollout.engine import Completion
from classroom_rl.rollout.rows import CORRECTION, DRAFT, NO_MESSAGE, POLICY, rows_of
from classroom_rl.rollout.store.journal import JOURNAL_NAME
from classroom_rl.rollout.supervision import OBSERVE, REPLACE, RETRY
from classroom_rl.rollout.tools.formats import CLOSE, OPEN
from tests.environments.classroom.conftest import ACCEPTS, CALLING_LINES, SOCRATIC, tool_call
from tests.rollout.test_chat_template import LOSES_A_LONE_SYSTEM, NO_SYSTEM, WANTS_A_USER
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import SCORES, Room
from tests.support.supervised_room import CORRECTION as CORRECTED
from tests.support.supervised_room import DrawnTeacher, Line, TextTeacher, play, rows_by_kind, supervising

# The prompt ----------------------------------------------------------------------------------------------------------


def trained(room: Room, record) -> str:
    return room.tokenizer.decode([token for token, bit in zip(record.completion_ids, record.mask, strict=True) if bit])


def test_a_forced_thought_is_in_the_context_and_not_trained_on(room: Room, generation: GenerationConfig):
    generation.use_thinking = generation.force_thinking = True
    room.teacher = ScriptedEngine(room.tokenizer, lambda _: "hm</think> Say hello.")
    record = room.play(generation)[0]
    prompts = [room.tokenizer.decode(prompt) for prompt, _, _ in room.teacher.calls]
    assert len(prompts) == 3 and all(prompt.endswith("assistant\n<think>\n") for prompt in prompts)
    assert trained(room, record) == "hm</think> Say hello.<|im_end|>" * 3
    assert room.tokenizer.decode(record.completion_ids).count("<think>\n") == 2  # the first one ends the prompt
    assert room.tokenizer.decode(record.prompt_ids).endswith("<think>\n")
    assert [turn.text for turn in record.turns[::2]] == ["<think>\nhm</think> Say hello."] * 3
    sampled = len(room.tokenizer.encode("hm</think> Say hello.", add_special_tokens=False)) + 1
    assert all(turn.tokens == sampled for turn in record.turns[::2])


def test_what_is_thought_under_force_is_hidden_and_rewarded(room: Room, generation: GenerationConfig):
    generation.force_thinking = True
    transcripts = []
    room.judge = ScriptedJudge(lambda rule, conversation, _: transcripts.append(conversation) or ACCEPTS)
    generation.judges_rules_prompts_paths = {"does_not_leak_answer": "scripted"}
    ordinals = iter(("first", "second", "third"))  # a thought that repeats pays once
    room.teacher = ScriptedEngine(room.tokenizer, lambda _: f"This is my {next(ordinals)} turn.</think> Say hello.")
    closed = room.play(generation)[0]
    assert closed.rewards["thinking"] == 0.5
    assert {message["content"] for message in transcripts[0][::2]} == {"Say hello."}
    assert not any("my" in room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls)
    room.teacher = ScriptedEngine(room.tokenizer, lambda _: "Say hello.")  # never closes it
    open_ended = room.play(generation, request_id="open")[0]
    assert open_ended.rewards["thinking"] == -1.5
    assert {message["content"] for message in transcripts[-1][::2]} == {""}


def test_a_template_that_opens_a_thought_itself_gets_no_second_one(room: Room, generation: GenerationConfig):
    template = room.tokenizer.chat_template
    opened = "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    room.tokenizer.chat_template = template.replace("{{- '<|im_start|>assistant\\n' }}", opened)
    try:
        assert room.tokenizer.chat_template != template and ReplyFrame(room.tokenizer).opens_thought
        for generation.force_thinking in (False, True):
            room.teacher = ScriptedEngine(room.tokenizer, lambda _: "hm</think> Say hello.")
            record = room.play(generation, request_id=f"forced-{generation.force_thinking}")[0]
            text = room.tokenizer.decode(record.prompt_ids + record.completion_ids)
            assert text.count("<think>") == 3 and record.turns[0].text == "<think>\nhm</think> Say hello."
    finally:
        room.tokenizer.chat_template = template


@pytest.mark.parametrize("opened_by", ["guided", "attempt"])
@pytest.mark.parametrize("template", [NO_SYSTEM, LOSES_A_LONE_SYSTEM, WANTS_A_USER])
def test_a_teacher_has_its_lesson_whatever_its_template_makes_of_system_messages(
    room: Room, generation: GenerationConfig, template: str, opened_by: str
):
    generation.forced_conversation_type = opened_by
    original, room.tokenizer.chat_template = room.tokenizer.chat_template, template
    try:
        room.teacher = ScriptedEngine(room.tokenizer, lambda _: "Say hello.")
        record = room.play(generation)[0]
        text = room.tokenizer.decode(record.prompt_ids + record.completion_ids)
    finally:
        room.tokenizer.chat_template = original
    assert text.count("Teach fractions to Sam.") == 1
    roles = [part.split("\n")[0] for part in text.split("<|im_start|>")[1:]]
    without_system = opened_by == "guided" or template != WANTS_A_USER
    assert roles == ([] if without_system else ["system"]) + ["user", "assistant"] * 3
    assert trained(room, record) == "Say hello.<|im_end|>" * 3


def test_a_template_may_open_the_dialogue(room: Room, socratic: GenerationConfig):
    transcripts = []
    room.judge = ScriptedJudge(lambda rule, conversation, _: transcripts.append(conversation) or json.dumps(SCORES))
    record = room.play(socratic)[0]
    turns = [(turn.role, turn.text, turn.given) for turn in record.turns]
    assert turns == [
        ("student", "Help me with fractions.", True),
        ("teacher", "What is asked?", True),
        ("student", "Hello.", False),
        ("teacher", "Say hello.", False),
        ("student", "Hello.", False),
        ("teacher", "Say hello.", False),  # max_turns 5 counts messages, and the teacher closes
    ]
    assert room.tokenizer.decode(record.prompt_ids) == (
        "<|im_start|>system\nYou teach by asking.<|im_end|>\n<|im_start|>user\nHelp me with fractions.<|im_end|>\n"
        "<|im_start|>assistant\nWhat is asked?<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trained(room, record) == "Say hello.<|im_end|>" * 2
    prompt = room.tokenizer.decode(room.student.calls[0][0])
    assert prompt.endswith("<assistant>Help me with fractions.\n<user>What is asked?")
    assert transcripts[0][0] == {"role": "student", "content": "Help me with fractions."}
    assert record.turns[2].persona is not None and record.turns[0].persona is None


def test_messages_of_the_template_earn_nothing(room: Room, maths: GenerationConfig, template):
    prompt = SOCRATIC.replace("What is asked?", "<think>hm</think> Say. <end_of_conversation>")
    rules = replace(maths, teacher_prompt_path=template(prompt), forced_conversation_type="guided", max_turns=4)
    record = room.play(rules)[0]
    assert record.rewards["thinking"] == record.rewards["end_of_conversation"] == 0.0


def test_the_shipped_template_opens_the_dialogue(room: Room, generation: GenerationConfig):
    generation.teacher_prompt_path = "prompt_templates/teacher_prompt_socratic.txt"
    record = room.play(generation)[0]
    assert "fractions" in record.turns[0].text and record.turns[1].text.endswith("try?")
    assert "fractions" not in room.tokenizer.decode(record.prompt_ids).split("<|im_end|>")[0]


# Tools ---------------------------------------------------------------------------------------------------------------

RESULT = "<tool_response>"
TOKENS = ("prompt_ids", "completion_ids", "mask", "logprobs")


LINES = [
    [f"<think>{tool_call('1+1')} hm</think>Let me see.{tool_call('6*7')}", "It is 42. And you?"],
    "Hello.",
    [tool_call("6*7", name="caculator"), f"{tool_call('6*8')}{tool_call('1/0')}", "Right, 48."],
    "unused",
    "Goodbye.",
]


def calling(room: Room, lines: list[Line] = LINES) -> Room:
    room.teacher, room.teacher_context = DrawnTeacher(room.tokenizer, lines), 6000
    return room


# What is said, and what is trained on --------------------------------------------------------------------------------


def check_tokens(record: ConversationRecord, teacher: ScriptedEngine) -> None:
    """The audit: the tokens with mask 1 are exactly the engine's, each with its log-prob, and each was sampled after
    exactly the tokens that are before it in the row that it is trained in; all others have neither."""
    rows = rows_of(record)
    trained: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []
    for row in rows:
        if row.kind == CORRECTION:
            continue
        start = 0
        while start < len(row.mask):
            if not row.mask[start]:
                assert row.logprobs[start] == 0.0 and row.messages[start] == NO_MESSAGE
                start += 1
                continue
            context = tuple(row.prompt_ids + row.completion_ids[:start])
            answers = [answer for prompt, _, answer in teacher.calls if tuple(prompt) == context]
            sampled = next(answer for answer in answers if matches(row, start, answer))
            end = start + len(sampled.ids)
            assert tuple(row.logprobs[start:end]) == sampled.logprobs
            assert set(row.mask[start:end]) == {1} and len({*row.messages[start:end]} - {NO_MESSAGE}) == 1
            trained.append((context, sampled.ids, sampled.logprobs))
            start = end
    all_sampled = [(tuple(prompt), answer.ids, answer.logprobs) for prompt, _, answer in teacher.calls]
    assert sorted(trained) == sorted(all_sampled), "every sampled token is trained on once"


def matches(row, start: int, answer: Completion) -> bool:
    return tuple(row.completion_ids[start : start + len(answer.ids)]) == answer.ids


def test_the_teacher_calls_and_only_what_it_says_is_heard(room: Room, tooled: GenerationConfig) -> None:
    transcript = []
    room.judge = ScriptedJudge(lambda rule, conversation, _: transcript.extend(conversation) or json.dumps(SCORES))
    (record,) = calling(room).play(tooled)
    assert [turn.text for turn in record.turns[::2]] == [
        f"<think>{tool_call('1+1')} hm</think>Let me see.\n\nIt is 42. And you?",
        "Right, 48.",
        "Goodbye.",
    ]
    first, second, third = (turn.tool_calls for turn in record.turns[::2])
    assert [(call.name, call.arguments, call.result, call.error) for call in first] == [
        ("calculator", {"expression": "6*7"}, "42", None)
    ]
    assert [(call.result, call.error, call.segment) for call in second][1:] == [
        ("48", None, 1),
        ("error: calculator failed: it divides by zero", "exception", 1),
    ]
    assert second[0].error == "unknown_tool" and "Tools that you can call: calculator" in second[0].result
    assert third == () and len({call.id for call in (*first, *second)}) == 4
    message = "Let me see.\n\nIt is 42. And you?"
    heard = "".join(room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls)
    for text in (heard, "".join(message["content"] for message in transcript)):
        assert message in text and OPEN not in text and RESULT not in text and "divides" not in text
    assert record.state == "END" and record.reward is not None
    prompt = room.tokenizer.decode(record.prompt_ids)
    assert "Teach fractions" in prompt and '"name": "calculator"' in prompt and '"name": "calculator"' not in heard


def test_tokens_are_the_engine_s_and_results_are_not_trained_on(room: Room, tooled: GenerationConfig) -> None:
    (record,) = calling(room).play(tooled)
    check_tokens(record, room.teacher)
    for turn in record.turns[::2]:
        start, end = turn.span
        assert sum(record.mask[start:end]) == turn.tokens
        inside = zip(record.completion_ids[start:end], record.mask[start:end], strict=True)
        given = [token for token, bit in inside if not bit]
        assert room.tokenizer.decode(given).count("<|im_start|>user") == len({call.segment for call in turn.tool_calls})
    (row,) = rows_of(record)
    assert {number for number, bit in zip(row.messages, row.mask, strict=True) if bit} == {0, 1, 2}
    assert {number for number, bit in zip(row.messages, row.mask, strict=True) if not bit} == {NO_MESSAGE}


def test_a_message_s_limit_and_the_context_hold(room: Room, tooled: GenerationConfig) -> None:
    talkative = [[f"{tool_call('2**3000 - 2**2990')}{tool_call('2**3000')}", "so " * 2000]]
    (record,) = calling(room, talkative).play(replace(tooled, max_tokens_per_turn=200))
    for turn in record.turns[::2]:
        assert turn.tokens <= 200 and not turn.ended
    assert len(record.prompt_ids) + len(record.completion_ids) <= 6000
    check_tokens(record, room.teacher)


def test_without_tools_a_call_is_only_text(room: Room, generation: GenerationConfig) -> None:
    (record,) = calling(room, [[tool_call("1+1"), "unused"]]).play(replace(generation, max_tokens_per_turn=300))
    first = record.turns[0]
    assert (first.text, first.tool_calls, len(room.teacher.calls)) == (tool_call("1+1"), (), 3)
    lines = (room.folder / JOURNAL_NAME).read_text()
    assert "tool_calls" not in lines and '"mask"' not in lines
    assert not {"teacher_tools", "tool_limits"} & set(generation.identity())


def test_tools_and_their_limits_are_a_part_of_the_batch(tooled: GenerationConfig) -> None:
    other = replace(tooled, tool_limits=ToolLimitsConfig(calls=1))
    assert tooled.identity() != other.identity()
    alone = replace(tooled, teacher_tools=[])
    assert alone.identity() == replace(other, teacher_tools=[]).identity()


def test_the_limits_reach_the_toolbox(room: Room, tooled: GenerationConfig) -> None:
    rules = replace(tooled, tool_limits=ToolLimitsConfig(calls=1, characters=2), max_turns=1)
    (record,) = calling(room, [[f"{tool_call('10**5')}{tool_call('2')}", "Done."]]).play(rules)
    first, second = record.turns[0].tool_calls
    assert first.result == "10… (cut: it has 6 characters)" and second.error == "limit"


def test_other_weights_in_the_middle_of_a_message_are_noticed(room: Room, tooled: GenerationConfig, tmp_path) -> None:
    calling(room)
    original = room.teacher.generate

    async def changes(prompt_ids, sampling):
        answer = await original(prompt_ids, sampling)
        return replace(answer, weights="others") if len(room.teacher.calls) == 1 else answer

    room.teacher.generate = changes
    with pytest.raises(PolicyMismatch, match="Other weights were loaded"):
        room.play(tooled, run_id="", policy_version=0)


# Supervised ----------------------------------------------------------------------------------------------------------

MODES = {
    "observe": {"on_invalid": OBSERVE},
    "retry": {"on_invalid": RETRY, "max_retries": 2},
    "retry with the critique": {"on_invalid": RETRY, "max_retries": 2, "show_critique": True},
    "replace": {"on_invalid": REPLACE},
}


@pytest.mark.parametrize("mode", MODES)
def test_drafts_with_calls_are_trained_on_as_they_were_sampled(room: Room, tooled, mode: str) -> None:
    record = play(calling(room), supervising(tooled, **MODES[mode]), *CALLING_LINES)
    check_tokens(record, room.teacher)
    assert all(OPEN not in about.message and RESULT not in about.message for about in room.supervisor.asked)
    if mode == "observe":
        assert record.turns[0].text == "It is wrong, 42.\n\nReally." and not record.turns[0].drafts
    else:
        draft = record.turns[0].drafts[0]
        assert [call.result for call in draft.tool_calls] == ["42", "1"]
        assert any(0 in row.mask[len(row.mask) - 30 :] for row in rows_by_kind(record)[DRAFT])
    if mode == "replace":
        assert record.turns[0].replaced and record.turns[0].tool_calls == () and record.turns[0].text == CORRECTED
    if mode == "retry with the critique":
        assert rows_by_kind(record)[POLICY]


def test_a_correction_keeps_the_calls_that_came_before_the_first_word(room: Room, tokenizer, tooled) -> None:
    record = play(calling(room), supervising(tooled), CALLING_LINES[0], "", CALLING_LINES[3], "", "Fine.")
    first, second = rows_by_kind(record)[CORRECTION][:2]
    completion = tokenizer.decode(first.completion_ids)
    assert completion.startswith(f"{tool_call('6*7')}<|im_end|>") and "42\n</tool_response>" in completion
    assert completion.endswith(f"<|im_start|>assistant\n{CORRECTED}<|im_end|>") and "wrong" not in completion
    assert sum(first.target) == len(tokenizer.encode(CORRECTED)) + 1
    third = tokenizer.decode(second.completion_ids)
    assert third.endswith(
        f"6\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>b</think>{CORRECTED}<|im_end|>"
    )


# Teachers behind an API ----------------------------------------------------------------------------------------------


def test_a_teacher_behind_an_api_has_tools_too(room: Room, tooled: GenerationConfig) -> None:
    room.teacher, room.teacher_context = TextTeacher(LINES), 6000
    (record,) = room.play(tooled)
    assert [turn.text for turn in record.turns[::2]][1:] == ["Right, 48.", "Goodbye."]
    assert [call.error for call in record.turns[2].tool_calls] == ["unknown_tool", None, "exception"]
    prompts = [messages for messages, _ in room.teacher.calls]
    assert all("# Tools" in messages[0]["content"] for messages in prompts)
    assert prompts[1][-1] == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
    assert all(CLOSE not in message["content"] for message in prompts[2][2:]), "what is over is what was said"
    assert len({sampling.draw for _, sampling in room.teacher.calls}) == len(room.teacher.calls) == 6
