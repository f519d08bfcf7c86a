"""The student as the model under training, with scripted engines and a real tokenizer: whose tokens are trained on,
with which prompts, masks and log-probs; and how a batch goes on after a restart."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import numpy
import pytest
from safetensors.numpy import save_file

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.values import END_OF_CONVERSATION, TRAINS_STUDENT
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.errors import PolicyMismatch
from classroom_rl.models.policy_folder import policy_path, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.store.journal import JOURNAL_NAME
from classroom_rl.rollout.tokens import TokenBuffer
from classroom_rl.rollout.trajectory import NEVER_SPOKE
from classroom_rl.viewer.journal_tail import JournalTail
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room
from tests.support.toy_lesson import PROBLEM, RIGHT

REQUEST = {"problems": [PROBLEM], "answers": [""], "run_id": "run", "policy_version": 3}


@pytest.fixture
def trained(room: Room, generation: GenerationConfig) -> GenerationConfig:
    """Lessons of five messages whose student is trained; its messages differ."""
    lines = iter([RIGHT, "Oh.", "<think>plan</think>Well.", *["More."] * 9])
    room.student = ScriptedEngine(room.tokenizer, lambda _: next(lines))
    room.student.policy = PolicyVersion("run", 3)
    return replace(generation, trained_role=TRAINS_STUDENT)


def test_only_what_the_student_sampled_is_trained_on(room: Room, trained: GenerationConfig) -> None:
    record = room.play(trained, **REQUEST)[0]
    assert [turn.role for turn in record.turns] == ["teacher", "student"] * 2 + ["teacher"]
    assert [turn.policy for turn in record.turns if turn.role == "teacher"] == [None] * 3
    rows = rows_of(record)
    assert len(rows) == len(room.student.calls) == 2
    for number, (row, (prompt, _, sampled)) in enumerate(zip(rows, room.student.calls, strict=True)):
        learned = [bit == 1 for bit in row.mask]
        assert row.prompt_ids == prompt
        assert [token for token, bit in zip(row.completion_ids, learned, strict=True) if bit] == list(sampled.ids)
        assert [logprob for logprob, bit in zip(row.logprobs, learned, strict=True) if bit] == list(sampled.logprobs)
        assert row.messages == [number] * len(row.completion_ids) and row.kind == "policy"


def test_each_message_has_the_prompt_of_its_persona(room: Room, trained: GenerationConfig) -> None:
    trained = replace(trained, student_error_rate=1.0)
    record = room.play(trained, **REQUEST)[0]
    first, second = [room.tokenizer.decode(row.prompt_ids) for row in rows_of(record)]
    assert first.startswith("<|im_start|>system\nMake an error.") and first.endswith("assistant\n")
    assert "Say hello." in first and RIGHT not in first and RIGHT in second
    assert {turn.persona for turn in record.turns if turn.role == "student"} == {"error_student"}


def test_the_teacher_reads_what_it_was_trained_on(room: Room, trained: GenerationConfig) -> None:
    prompts = []
    room.teacher.chat = _recording(room.teacher, prompts)
    room.play(trained, **REQUEST)
    assert [message["role"] for message in prompts[0]] == ["system"]
    assert [message["role"] for message in prompts[1]] == ["system", "assistant", "user"]
    assert prompts[1][2]["content"] == RIGHT


def _recording(engine: ScriptedEngine, prompts: list):
    chat = ScriptedEngine.chat

    async def recorded(messages, sampling):
        prompts.append(messages)
        return await chat(engine, messages, sampling)

    return recorded


def test_a_thought_is_trained_on_and_not_heard(room: Room, trained: GenerationConfig) -> None:
    room.student = ScriptedEngine(room.tokenizer, lambda _: "<think>plan</think>Well.")
    room.student.policy = PolicyVersion("run", 3)
    record = room.play(trained, **REQUEST)[0]
    assert [turn.text for turn in record.turns if turn.role == "student"] == ["Well."] * 2
    assert all("plan" in room.tokenizer.decode(row.completion_ids) for row in rows_of(record))


def test_a_cut_message_gets_an_end_that_is_not_trained_on(room: Room, trained: GenerationConfig) -> None:
    room.student = ScriptedEngine(room.tokenizer, lambda _: "Say " * 60)
    room.student.policy = PolicyVersion("run", 3)
    first, second = rows_of(room.play(trained, **REQUEST)[0])
    assert first.mask == [1] * 48 + [0] and second.mask == [1] * 48


def test_a_restarted_server_samples_nothing_again(room: Room, trained: GenerationConfig) -> None:
    [before] = room.play(trained, **REQUEST)
    calls = [len(engine.calls) for engine in (room.teacher, room.student)]
    [after] = room.play(trained, **REQUEST)
    assert after == before and rows_of(after) == rows_of(before)
    assert [len(engine.calls) for engine in (room.teacher, room.student)] == calls


def test_a_broken_batch_goes_on_where_it_was(room: Room, trained: GenerationConfig) -> None:
    [expected] = room.play(trained, **REQUEST)
    journal = room.folder / JOURNAL_NAME
    events = journal.read_text().splitlines(keepends=True)
    turns = [index for index, line in enumerate(events) if '"event":"turn"' in line.replace(" ", "")]
    for kept_turns in range(1, len(turns)):
        journal.write_text("".join(events[: turns[kept_turns]]))
        lines = iter([turn.text for turn in expected.turns if turn.role == "student"][kept_turns // 2 :])
        room.student = ScriptedEngine(room.tokenizer, lambda _, lines=lines: next(lines))
        room.student.policy = PolicyVersion("run", 3)
        [resumed] = room.play(trained, **REQUEST)
        assert rows_of(resumed) == rows_of(expected), kept_turns
        assert len(room.student.calls) == 2 - kept_turns // 2


def test_a_prompt_that_opens_the_lesson_is_restored(room: Room, trained: GenerationConfig, socratic) -> None:
    """The student speaks before the teacher's first sampled message."""
    opened = replace(trained, teacher_prompt_path=socratic.teacher_prompt_path)
    [before] = room.play(opened, **REQUEST)
    assert [turn.role for turn in before.turns] == ["student", "teacher"] * 2 + ["student", "teacher"]
    [after] = room.play(opened, **REQUEST)
    assert rows_of(after) == rows_of(before) and len(rows_of(before)) == 2


def test_the_students_context_is_not_the_teachers(room: Room, trained: GenerationConfig) -> None:
    rules = room.open(trained).environment.rules
    conversation = Conversation(
        "c", Problem.of(PROBLEM), Setup(ConversationType.GUIDED, None, ("correct_student",)), rules
    )
    conversation.start()
    conversation.open_estimated(100)
    conversation.buffer = TokenBuffer(range(700))
    assert conversation.tokens_left == rules.max_tokens_in_conversation - 100


def test_the_page_follows_such_a_lesson(room: Room, trained: GenerationConfig) -> None:
    [record] = room.play(trained, **REQUEST)
    tail = JournalTail(room.folder / JOURNAL_NAME)
    [play] = [play for play in tail.conversations(0.0, ()) if play.id == record.id]
    assert [turn["text"] for turn in tail.record(play)["turns"]] == [turn.text for turn in record.turns]


def test_a_student_that_never_spoke_fails_no_judge(room: Room, trained: GenerationConfig) -> None:
    room.teacher = ScriptedEngine(room.tokenizer, lambda _: f"Bye. {END_OF_CONVERSATION}")
    record = room.play(trained, **REQUEST)[0]
    assert record.failure == NEVER_SPOKE and record.reward is None and record.unrewarded
    [row] = rows_of(record)
    assert sum(row.mask) == 0 and row.completion_ids and row.prompt_ids == record.prompt_ids


def test_a_full_context_of_the_student_ends_the_lesson(room: Room, trained: GenerationConfig) -> None:
    room.student_context = len(room.play(trained, **REQUEST)[0].prompt_ids) + 40
    lines = iter(["Oh " * 20, "Oh."])
    room.student = ScriptedEngine(room.tokenizer, lambda _: next(lines))
    room.student.policy = PolicyVersion("run", 3)
    record = room.play(trained, **REQUEST | {"request_id": "r2"})[0]
    assert "context" in record.overflow and record.rewards["student"] is not None
    assert len(rows_of(record)) == 1


def test_other_weights_under_a_batch_are_noticed(room: Room, trained: GenerationConfig) -> None:
    room.student.weights = "others"

    def publish(_: str) -> str:
        room.student.policy = PolicyVersion("run", 4)
        return RIGHT

    room.student._script = publish
    with pytest.raises(PolicyMismatch):
        room.play(trained, **REQUEST)


def test_weights_are_loaded_into_the_student(room: Room, trained: GenerationConfig) -> None:
    service = room.open(trained)
    roles = service.environment.roles
    assert roles.policy is room.student and roles.policy_role == "student"
    assert service.environment.roles.health().keys() >= {"student"}
    folder = policy_path(room.folder, 3)
    weights = {"w": numpy.zeros(4, numpy.float32)}
    write_policy(folder, PolicyVersion("run", 3), lambda target: save_file(weights, target / "model.safetensors"))
    awake = []
    service.engine_sleep.room_for_loading = lambda role: awake.append(role) or nullcontext()
    room.student.policy = PolicyVersion()
    asyncio.run(service.load_policy(folder, PolicyVersion("run", 3), 5.0))
    assert awake == ["student"] and room.student.policy == PolicyVersion("run", 3) != room.teacher.policy


def test_the_students_own_reward_is_the_sum(room: Room, trained: GenerationConfig) -> None:
    record = room.play(trained, **REQUEST)[0]
    assert record.rewards.keys() == {"student", "pedagogical"} and record.rewards["pedagogical"] == 0.7
    assert record.reward == record.rewards["student"]


def test_a_teachers_training_is_as_before(room: Room, generation: GenerationConfig) -> None:
    assert "trained_role" not in generation.identity()
    assert replace(generation, trained_role=TRAINS_STUDENT).identity()["trained_role"] == TRAINS_STUDENT
    record = room.play(generation)[0]
    assert record.branches == [] and sum(record.mask) > 0
