"""The parts of the teacher's context that it does not sample: forced thoughts, and opening messages as in
SocraticLM."""

import json
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.prompt_check import check_prompts
from classroom_rl.errors import DataError
from classroom_rl.rollout.chat_template import ReplyFrame
from classroom_rl.trainer.sample_batch import to_rollout
from tests.rollout.test_chat_template import LOSES_A_LONE_SYSTEM, NO_SYSTEM, WANTS_A_USER
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import SCORES, Room

SHAPE = (
    "{% if user_message %}Help me with {{ problem }}.{% elif teacher_message %}What is asked?"
    "{% else %}You teach by asking.{% if include_thinking %} Think.{% endif %}{% endif %}"
)


@pytest.fixture
def socratic(generation: GenerationConfig, tmp_path: Path) -> GenerationConfig:
    path = tmp_path / "socratic.txt"
    path.write_text(SHAPE, encoding="utf-8")
    generation.teacher_prompt_path = str(path)
    return generation


def trained(room: Room, record) -> str:
    return room.tokenizer.decode([i for i, bit in zip(record.completion_ids, record.mask, strict=True) if bit])


def test_a_forced_thought_is_in_the_context_and_not_trained_on(room: Room, generation: GenerationConfig):
    generation.use_thinking = generation.force_thinking = True
    room.teacher = ScriptedEngine(room.tokenizer, lambda _: "hm</think> Say hello.")
    record = room.play(generation)[0]
    prompts = [room.tokenizer.decode(prompt) for prompt, _, _ in room.teacher.calls]
    assert len(prompts) == 3 and all(prompt.endswith("assistant\n<think>\n") for prompt in prompts)
    assert trained(room, record) == "hm</think> Say hello.<|im_end|>" * 3
    assert room.tokenizer.decode(record.completion_ids).count("<think>\n") == 2  # the first one ends the prompt
    assert room.tokenizer.decode(record.prompt_ids).endswith("<think>\n")
    assert to_rollout([record])["env_mask"] == [record.mask]
    assert [turn.text for turn in record.turns[::2]] == ["<think>\nhm</think> Say hello."] * 3
    sampled = len(room.tokenizer.encode("hm</think> Say hello.", add_special_tokens=False)) + 1
    assert all(turn.tokens == sampled for turn in record.turns[::2])


def test_what_is_thought_under_force_is_hidden_and_rewarded(room: Room, generation: GenerationConfig):
    generation.force_thinking = True
    heard = []
    room.judge = ScriptedJudge(
        lambda rule, conversation, _: heard.append(conversation) or '{"reasoning": "", "decision": "OK"}'
    )
    generation.judges_rules_prompts_paths = {"does_not_leak_answer": "scripted"}
    places = iter(("first", "second", "third"))  # a thought that repeats pays once
    room.teacher = ScriptedEngine(room.tokenizer, lambda _: f"This is my {next(places)} turn.</think> Say hello.")
    closed = room.play(generation)[0]
    assert closed.rewards["thinking"] == 0.5
    assert {message["content"] for message in heard[0][::2]} == {"Say hello."}
    assert not any("my" in room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls)
    room.teacher = ScriptedEngine(room.tokenizer, lambda _: "Say hello.")  # never closes it
    open_ended = room.play(generation, request_id="open")[0]
    assert open_ended.rewards["thinking"] == -1.5
    assert {message["content"] for message in heard[-1][::2]} == {""}


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
    own, room.tokenizer.chat_template = room.tokenizer.chat_template, template
    try:
        room.teacher = ScriptedEngine(room.tokenizer, lambda _: "Say hello.")
        record = room.play(generation)[0]
        text = room.tokenizer.decode(record.prompt_ids + record.completion_ids)
    finally:
        room.tokenizer.chat_template = own
    assert text.count("Teach fractions to Sam.") == 1
    roles = [part.split("\n")[0] for part in text.split("<|im_start|>")[1:]]
    alone = opened_by == "guided" or template != WANTS_A_USER
    assert roles == ([] if alone else ["system"]) + ["user", "assistant"] * 3
    assert trained(room, record) == "Say hello.<|im_end|>" * 3


def test_a_template_may_open_the_dialogue(room: Room, socratic: GenerationConfig):
    judged = []
    room.judge = ScriptedJudge(lambda rule, conversation, _: judged.append(conversation) or json.dumps(SCORES))
    record = room.play(socratic)[0]
    said = [(turn.role, turn.text, turn.given) for turn in record.turns]
    assert (
        said
        == [
            ("student", "Help me with fractions.", True),
            ("teacher", "What is asked?", True),
            ("student", "Hello.", False),
            ("teacher", "Say hello.", False),
            ("student", "Hello.", False),
            ("teacher", "Say hello.", False),
        ][: len(said)]
    )
    assert len(said) == 6  # max_turns 5 counts messages, and the teacher closes
    assert room.tokenizer.decode(record.prompt_ids) == (
        "<|im_start|>system\nYou teach by asking.<|im_end|>\n<|im_start|>user\nHelp me with fractions.<|im_end|>\n"
        "<|im_start|>assistant\nWhat is asked?<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trained(room, record) == "Say hello.<|im_end|>" * 2
    asked = room.tokenizer.decode(room.student.calls[0][0])
    assert asked.endswith("<assistant>Help me with fractions.\n<user>What is asked?")
    assert judged[0][0] == {"role": "student", "content": "Help me with fractions."}
    assert record.turns[2].persona is not None and record.turns[0].persona is None


def test_messages_of_the_template_earn_nothing(room: Room, generation: GenerationConfig, tmp_path: Path):
    path = tmp_path / "thinks.txt"
    goodbye = "<think>hm</think> Say. <end_of_conversation>"
    path.write_text(SHAPE.replace("What is asked?", goodbye), encoding="utf-8")
    generation.teacher_prompt_path, generation.max_turns = str(path), 4
    generation.judges_rules_prompts_paths = {"does_not_leak_answer": "scripted"}
    room.judge = ScriptedJudge(lambda *_: '{"reasoning": "", "decision": "OK"}')
    record = room.play(generation)[0]
    assert record.rewards["thinking"] == record.rewards["end_of_conversation"] == 0.0


def test_an_opened_dialogue_is_taken_up_again(room: Room, socratic: GenerationConfig):
    first = room.play(socratic)[0]
    journal = room.folder / "journal.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    turns = [i for i, line in enumerate(lines) if json.loads(line)["event"] == "turn"]
    for cut in turns:
        journal.write_text("".join(lines[: cut + 1]), encoding="utf-8")
        again = room.play(socratic)[0]
        assert (again.prompt_ids, again.completion_ids, again.mask) == (
            first.prompt_ids,
            first.completion_ids,
            first.mask,
        )


@pytest.mark.parametrize("forced", [None, "attempt"])
def test_a_template_that_opens_the_dialogue_leaves_no_place_for_an_attempt(socratic: GenerationConfig, forced):
    socratic.forced_conversation_type = forced
    with pytest.raises(DataError, match="set generation.forced_conversation_type=guided"):
        check_prompts(socratic, judge_reads_templates=False)


def test_the_shipped_template_opens_the_dialogue(room: Room, generation: GenerationConfig):
    generation.teacher_prompt_path = "prompt_templates/teacher_prompt_socratic.txt"
    check_prompts(generation, judge_reads_templates=False)
    record = room.play(generation)[0]
    assert "fractions" in record.turns[0].text and record.turns[1].text.endswith("try?")
    assert "fractions" not in room.tokenizer.decode(record.prompt_ids).split("<|im_end|>")[0]
