"""A teacher with tools: what it is told, what the others hear, which tokens are trained on, and what a kill repeats."""

import asyncio
import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig, ToolLimitsConfig
from classroom_rl.config.checks import check_generation
from classroom_rl.environments.classroom.metrics import tool_metrics
from classroom_rl.environments.classroom.prompt_check import check_lengths
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError, DataError, PolicyMismatch
from classroom_rl.results.rollout_files import read_records, write_records
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.rows import CORRECTION, DRAFT, NO_MESSAGE, POLICY, rows_of
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.rollout.supervision import OBSERVE, REPLACE, RETRY
from classroom_rl.rollout.tools.calculator import BUILT_IN_TOOLS
from classroom_rl.rollout.tools.formats import CLOSE, OPEN
from classroom_rl.rollout.tools.tool import ERRORS, Tool
from classroom_rl.viewer.turn_views import turn_view
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import SCORES, Room
from tests.support.supervised_room import CORRECTION as CORRECTED
from tests.support.supervised_room import ScriptedSupervisor, TextTeacher, rows_by_kind, supervising
from tests.trainer.test_resume import what_happened, write_journal

RESULT = "<tool_response>"
TOKENS = ("prompt_ids", "completion_ids", "mask", "logprobs")


def call(expression: str, name: str = "calculator") -> str:
    return f"{OPEN}{json.dumps({'name': name, 'arguments': {'expression': expression}})}{CLOSE}"


class CallingTeacher(ScriptedEngine):
    """A teacher whose lines depend on the answer and on the segment of the message: `lines[i][j]` is what it writes
    after i answers and j results; the last ones stand for all that follow."""

    def __init__(self, tokenizer, lines: list[list[str]]):
        super().__init__(tokenizer, lambda _: "")
        self.lines = lines

    async def generate(self, prompt_ids, sampling: Sampling) -> Completion:
        message = self.lines[min(sampling.draw[1], len(self.lines) - 1)]
        segment = sampling.draw[3] if len(sampling.draw) > 2 else 0
        one = copy.copy(self)
        one._script = lambda _: message[min(segment, len(message) - 1)]
        return await ScriptedEngine.generate(one, prompt_ids, sampling)


class CallingTextTeacher(TextTeacher):
    """The same without tokens."""

    async def chat(self, messages, sampling: Sampling) -> Completion:
        message = self.lines[min(sampling.draw[1], len(self.lines) - 1)]
        self.calls.append((list(messages), sampling))
        line = message[min(sampling.draw[3] if len(sampling.draw) > 2 else 0, len(message) - 1)]
        return Completion((), (), line, True, self.policy, counted=5, weights=self.weights)


LINES = [
    [f"<think>{call('1+1')} hm</think>Let me see.{call('6*7')}", "It is 42. And you?"],
    ["Hello."],
    [call("6*7", name="caculator"), f"{call('6*8')}{call('1/0')}", "Right, 48."],
    ["unused"],
    ["Goodbye."],
]


@pytest.fixture
def tooled(generation: GenerationConfig) -> GenerationConfig:
    """The rules of the other tests, with a calculator, and room for what it says."""
    return replace(generation, teacher_tools=["calculator"], max_tokens_in_conversation=900, max_tokens_per_turn=300)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room's teacher has a context for prompts with tools in them."""
    import tests.support.scripted_room as scripted_room

    original = scripted_room.classroom_rules

    def roomy(generation, weights, teacher_context, graded):
        return original(replace(generation, max_tokens_in_conversation=6000), weights, 6000, graded)

    monkeypatch.setattr(scripted_room, "classroom_rules", roomy)


pytestmark = pytest.mark.usefixtures("wide")


def calling(room: Room, lines: list[list[str]] = LINES) -> Room:
    room.teacher = CallingTeacher(room.tokenizer, lines)
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
        place = 0
        while place < len(row.mask):
            if not row.mask[place]:
                assert row.logprobs[place] == 0.0 and row.messages[place] == NO_MESSAGE
                place += 1
                continue
            context = tuple(row.prompt_ids + row.completion_ids[:place])
            answers = [each for prompt, _, each in teacher.calls if tuple(prompt) == context]
            found = next(each for each in answers if matches(row, place, each))
            end = place + len(found.ids)
            assert tuple(row.logprobs[place:end]) == found.logprobs
            assert set(row.mask[place:end]) == {1} and len({*row.messages[place:end]} - {NO_MESSAGE}) == 1
            trained.append((context, found.ids, found.logprobs))
            place = end
    sampled = [(tuple(prompt), each.ids, each.logprobs) for prompt, _, each in teacher.calls]
    assert sorted(trained) == sorted(sampled), "every sampled token is trained on once"


def matches(row, place: int, answer: Completion) -> bool:
    return tuple(row.completion_ids[place : place + len(answer.ids)]) == answer.ids


def test_the_teacher_calls_and_only_what_it_says_is_heard(room: Room, tooled: GenerationConfig) -> None:
    (record,) = calling(room).play(tooled)
    assert [turn.text for turn in record.turns[::2]] == [
        f"<think>{call('1+1')} hm</think>Let me see.\n\nIt is 42. And you?",
        "Right, 48.",
        "Goodbye.",
    ]
    first, second, third = (turn.tool_calls for turn in record.turns[::2])
    assert [(each.name, each.arguments, each.result, each.error) for each in first] == [
        ("calculator", {"expression": "6*7"}, "42", None)
    ]
    assert [(each.result, each.error, each.segment) for each in second][1:] == [
        ("48", None, 1),
        ("error: calculator failed: it divides by zero", "exception", 1),
    ]
    assert second[0].error == "unknown_tool" and "Tools that you can call: calculator" in second[0].result
    assert third == () and len({each.id for each in (*first, *second)}) == 4
    said = "Let me see.\n\nIt is 42. And you?"
    heard = "".join(room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls)
    assert said in heard and OPEN not in heard and RESULT not in heard and "divides" not in heard
    assert record.state == "END" and record.reward is not None


def test_the_judge_reads_what_was_said(room: Room, tooled: GenerationConfig) -> None:
    read = []
    room.judge._answer = lambda rule, conversation, attempt: read.append(conversation) or json.dumps(SCORES)
    calling(room).play(tooled)
    assert read and all(OPEN not in turn["content"] and RESULT not in turn["content"] for turn in read[0])
    assert read[0][0]["content"] == "Let me see.\n\nIt is 42. And you?"


def test_the_prompt_lists_the_tools_and_nothing_else_changes_in_it(room: Room, tooled: GenerationConfig) -> None:
    (record,) = calling(room).play(tooled)
    prompt = room.tokenizer.decode(record.prompt_ids)
    assert "Teach fractions" in prompt and '"name": "calculator"' in prompt and "expression" in prompt
    assert '"name": "calculator"' not in "".join(room.tokenizer.decode(p) for p, _, _ in room.student.calls)


def test_tokens_are_the_engine_s_and_results_are_not_trained_on(room: Room, tooled: GenerationConfig) -> None:
    (record,) = calling(room).play(tooled)
    check_tokens(record, room.teacher)
    for turn in record.turns[::2]:
        start, end = turn.span
        assert sum(record.mask[start:end]) == turn.tokens
        inside = zip(record.completion_ids[start:end], record.mask[start:end], strict=True)
        given = [each for each, bit in inside if not bit]
        assert room.tokenizer.decode(given).count("<|im_start|>user") == len({each.segment for each in turn.tool_calls})
    (row,) = rows_of(record)
    assert {number for number, bit in zip(row.messages, row.mask, strict=True) if bit} == {0, 1, 2}
    assert {number for number, bit in zip(row.messages, row.mask, strict=True) if not bit} == {NO_MESSAGE}


def test_every_segment_has_a_seed_of_its_own(room: Room, tooled: GenerationConfig) -> None:
    calling(room).play(tooled, fixed_seeds=True)
    seeds = [sampling.seed for _, sampling, _ in room.teacher.calls]
    assert None not in seeds and len(set(seeds)) == len(seeds) == 6
    other = calling(Room(room.tokenizer, room.folder.with_name("again")))
    other.play(tooled, fixed_seeds=True)
    assert [sampling.seed for _, sampling, _ in other.teacher.calls] == seeds


def test_a_message_s_limit_and_the_context_hold(room: Room, tooled: GenerationConfig) -> None:
    talkative = [[f"{call('2**3000 - 2**2990')}{call('2**3000')}", "so " * 2000]]
    (record,) = calling(room, talkative).play(replace(tooled, max_tokens_per_turn=200))
    for turn in record.turns[::2]:
        assert turn.tokens <= 200 and not turn.ended
    assert len(record.prompt_ids) + len(record.completion_ids) <= 6000
    check_tokens(record, room.teacher)


def test_without_tools_a_call_is_only_text(room: Room, generation: GenerationConfig) -> None:
    (record,) = calling(room, [[call("1+1"), "unused"]]).play(replace(generation, max_tokens_per_turn=300))
    assert record.turns[0].text == call("1+1") and record.turns[0].tool_calls == () and len(room.teacher.calls) == 3
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
    (record,) = calling(room, [[f"{call('10**5')}{call('2')}", "Done."]]).play(rules)
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

SUPERVISED = [
    [call("6*7"), f"It is wrong, 42.{call('1')}", "Really."],
    [f"So wrong.{call('2+2')}", "It is 4."],
    ["Say hello."],
    [f"<think>a</think>{call('3+3')}", "<think>b</think>Also wrong: 6."],
    ["Fine."],
]
MODES = {
    "observe": {"on_invalid": OBSERVE},
    "retry": {"on_invalid": RETRY, "max_retries": 2},
    "retry with the critique": {"on_invalid": RETRY, "max_retries": 2, "show_critique": True},
    "replace": {"on_invalid": REPLACE},
}


def supervised_room(tokenizer, folder: Path, text: bool = False) -> Room:
    room = Room(tokenizer, folder)
    room.teacher = CallingTextTeacher(SUPERVISED) if text else CallingTeacher(tokenizer, SUPERVISED)
    room.supervisor, room.turn_rewards = ScriptedSupervisor(), ("supervisor", "length")
    return room


@pytest.mark.parametrize("mode", MODES)
def test_drafts_with_calls_are_trained_on_as_they_were_sampled(tokenizer, tmp_path, tooled, mode: str) -> None:
    room = supervised_room(tokenizer, tmp_path)
    (record,) = room.play(supervising(tooled, **MODES[mode]), supervised=True)
    check_tokens(record, room.teacher)
    assert all(OPEN not in about.message and RESULT not in about.message for about in room.supervisor.asked)
    if mode == "observe":
        assert record.turns[0].text == "It is wrong, 42.\n\nReally." and not record.turns[0].drafts
    else:
        draft = record.turns[0].drafts[0]
        assert [each.result for each in draft.tool_calls] == ["42", "1"]
        assert any(0 in row.mask[len(row.mask) - 30 :] for row in rows_by_kind(record)[DRAFT])
    if mode == "replace":
        assert record.turns[0].replaced and record.turns[0].tool_calls == () and record.turns[0].text == CORRECTED
    if mode == "retry with the critique":
        assert rows_by_kind(record)[POLICY]


def test_a_correction_keeps_the_calls_that_came_before_the_first_word(tokenizer, tmp_path, tooled) -> None:
    room = supervised_room(tokenizer, tmp_path)
    room.teacher.lines = [SUPERVISED[0], [], SUPERVISED[3], [], ["Fine."]]
    (record,) = room.play(supervising(tooled), supervised=True)
    first, second = rows_by_kind(record)[CORRECTION][:2]
    shown = tokenizer.decode(first.completion_ids)
    assert shown.startswith(f"{call('6*7')}<|im_end|>") and "42\n</tool_response>" in shown
    assert shown.endswith(f"<|im_start|>assistant\n{CORRECTED}<|im_end|>") and "wrong" not in shown
    assert sum(first.target) == len(tokenizer.encode(CORRECTED)) + 1
    third = tokenizer.decode(second.completion_ids)
    assert third.endswith(
        f"6\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>b</think>{CORRECTED}<|im_end|>"
    )


# A kill, and files ---------------------------------------------------------------------------------------------------


def sample(room: Room, generation: GenerationConfig, **changes) -> tuple[ConversationRecord, ConversationRecord]:
    body = {"problems": ["fractions"], "answers": ["1/2"], "request_id": "r", "seed": 1, "step": 0}

    async def life() -> tuple[ConversationRecord, ConversationRecord]:
        service = room.open(generation)
        (record,) = (await service.sample(SampleRequest(**(body | changes)))).conversations
        return record, service.record(record.id)

    return asyncio.run(life())


def untimed(record: ConversationRecord) -> dict:
    """A record without the seconds that calls took."""

    def without(value):
        if isinstance(value, dict):
            return {name: without(each) for name, each in value.items() if name != "seconds"}
        return [without(each) for each in value] if isinstance(value, list | tuple) else value

    return without(record.model_dump())


@pytest.mark.parametrize("text", [False, True], ids=["tokens", "text"])
@pytest.mark.parametrize("mode", ["alone", "retry with the critique", "replace"])
def test_wherever_a_kill_comes_no_finished_message_is_written_again(
    tokenizer, tmp_path: Path, tooled: GenerationConfig, monkeypatch: pytest.MonkeyPatch, mode: str, text: bool
) -> None:
    """The journal is cut at every line, with half of the next one behind it: what is in it is neither sampled nor
    calculated again."""
    ran: list[str] = []

    async def counted(expression: str) -> str:
        """Computes."""
        ran.append(expression)
        return await calculator.function(expression)

    calculator = BUILT_IN_TOOLS["calculator"]
    monkeypatch.setitem(BUILT_IN_TOOLS, "calculator", Tool(counted, "calculator"))
    rules = tooled if mode == "alone" else supervising(tooled, **MODES[mode])
    whole = supervised_room(tokenizer, tmp_path / "whole", text)
    wanted, stored = sample(whole, rules, supervised=mode != "alone")
    assert stored == wanted and wanted.state == "END"
    once, ran[:] = Counter(ran), []
    lines = (whole.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    events = [json.loads(line) for line in lines]
    happened = Counter(map(what_happened, events[1:]))
    for count in range(1, len(lines) + 1):
        room = supervised_room(tokenizer, tmp_path / f"cut{count}", text)
        write_journal(room, lines[:count], lines[count][: len(lines[count]) // 2] if count < len(lines) else b"")
        ran.clear()
        found = sample(room, rules, supervised=mode != "alone")
        assert [untimed(each) for each in found] == [untimed(wanted)] * 2, f"cut after {count} lines"
        known = [each.get("draft", each).get("turn") for each in events[:count] if "draft" in each]
        if mode == "alone":
            known = [each["turn"] for each in events[:count] if each["event"] == "turn"]
        done = Counter(each["arguments"]["expression"] for turn in known for each in turn.get("tool_calls", ()))
        assert Counter(ran) == once - done
        after = [event for event in read_journal(room.folder / JOURNAL_NAME) if event["event"] != "batch"]
        if mode == "alone":
            continue  # the seconds of calls differ
        assert len(after) == happened.total()


def test_a_record_with_calls_survives_its_file(tokenizer, tmp_path: Path, tooled: GenerationConfig) -> None:
    record, _ = sample(supervised_room(tokenizer, tmp_path), supervising(tooled, **MODES["replace"]), supervised=True)
    write_records(tmp_path / "written.parquet", [record])
    (read,) = read_records(tmp_path / "written.parquet")
    assert read.model_dump(exclude={"logprobs"}) == record.model_dump(exclude={"logprobs"})
    assert [(row.mask, row.messages) for row in rows_of(read)] == [(row.mask, row.messages) for row in rows_of(record)]


# Teachers behind an API ----------------------------------------------------------------------------------------------


def test_a_teacher_behind_an_api_has_tools_too(room: Room, tooled: GenerationConfig) -> None:
    room.teacher = CallingTextTeacher(LINES)
    (record,) = room.play(tooled)
    assert [turn.text for turn in record.turns[::2]][1:] == ["Right, 48.", "Goodbye."]
    assert [each.error for each in record.turns[2].tool_calls] == ["unknown_tool", None, "exception"]
    prompts = [messages for messages, _ in room.teacher.calls]
    assert all("# Tools" in messages[0]["content"] for messages in prompts)
    assert prompts[1][-1] == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
    assert all(CLOSE not in message["content"] for message in prompts[2][2:]), "what is over is what was said"
    assert len({sampling.draw for _, sampling in room.teacher.calls}) == len(room.teacher.calls) == 6


# Configuration, metrics, page ----------------------------------------------------------------------------------------


def test_a_tool_that_does_not_exist_is_refused(tooled: GenerationConfig) -> None:
    check_generation(tooled)
    with pytest.raises(ConfigError, match=r"names 'os\.system', and there is no such tool; there are: calculator\."):
        check_generation(replace(tooled, teacher_tools=["calculator", "os.system"]))
    with pytest.raises(ConfigError, match="name each tool once"):
        check_generation(replace(tooled, teacher_tools=["calculator", "calculator"]))


def test_a_prompt_that_is_too_long_with_its_tools_is_refused(tokenizer, tooled: GenerationConfig) -> None:
    problems = [Problem.of(("fractions"), "1/2")]
    plain = replace(tooled, teacher_tools=[])
    check_lengths(problems, plain, tokenizer, 100)
    with pytest.raises(DataError, match="makes a teacher prompt of"):
        check_lengths(problems, tooled, tokenizer, 100)


def test_metrics_count_the_calls_of_a_batch(tokenizer, tmp_path: Path, room: Room, tooled: GenerationConfig) -> None:
    records = calling(room).play(tooled)
    metrics = tool_metrics(records)
    assert metrics["tools/calls_per_conversation"] == 4 and metrics["tools/error_share"] == 0.5
    shares = {kind: metrics[f"tools/error_share/{kind}"] for kind in ERRORS}
    assert shares == dict.fromkeys(ERRORS, 0) | {"unknown_tool": 0.25, "exception": 0.25}
    drafted = supervised_room(tokenizer, tmp_path).play(supervising(tooled, **MODES["replace"]), supervised=True)
    assert tool_metrics(drafted)["tools/calls_per_conversation"] == sum(
        len(each.tool_calls) for turn in drafted[0].turns for each in (turn, *turn.drafts)
    )
    assert tool_metrics(calling(Room(tokenizer, tmp_path / "quiet"), [["Hello."]]).play(tooled)) == {}


def test_the_page_gets_calls_results_and_errors(room: Room, tooled: GenerationConfig) -> None:
    (record,) = calling(room, [[f"{OPEN}<b>{CLOSE}{call('1+1')}", "Two."]]).play(tooled)
    view = turn_view(record.model_dump(mode="json")["turns"][0], record.mask)
    broken, right = view.tool_calls
    assert (broken.name, broken.arguments, broken.error) == ("", f"{OPEN}<b>{CLOSE}", "bad_json")
    assert (right.name, right.arguments, right.result, right.error) == (
        "calculator",
        '{"expression": "1+1"}',
        "2",
        None,
    )
    assert view.trained == view.tokens and view.parts == [("said", "Two.")]
