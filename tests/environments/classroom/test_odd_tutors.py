"""Tutors that end at once, never end, leave thoughts open, say nothing, speak other languages or write special tokens:
none breaks a batch, and each gets the reward that was worked out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.conversation import ClassroomRules
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.trainer.sample_batch import batch_metrics, to_rollout
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import Room

LIMIT = 48
LAMBDA = 1.0
BYE = "<end_of_conversation>"
RULES = {"does_not_leak_answer": "scripted", "follows_pedagogical_values": "scripted"}


@dataclass(frozen=True)
class Tutor:
    """What a tutor says each time, what others hear of it, and by hand: how often it speaks in five messages, and its
    rewards where it is not rejected."""

    says: str
    heard: str
    speaks: int = 3
    thinking: float = 0.0
    goodbye: float = 0.0
    length: float = 0.0


TUTORS = {
    "ordinary": Tutor("Say hello.", "Say hello."),
    "ends at once": Tutor(BYE, BYE, speaks=1, goodbye=0.1),
    "ends at once with a word": Tutor(f"Bye! {BYE}", f"Bye! {BYE}", speaks=1, goodbye=0.1),
    "never ends": Tutor("a " * 200, "", length=-0.5),
    "thinks": Tutor(  # 0.5 × 1 of 3: the same thought pays once
        "<think>She is not sure of it.</think> Say hello.", "Say hello.", thinking=0.5 / 3
    ),
    "thinks nothing": Tutor("<think>hm</think> Say hello.", "Say hello."),
    "thinks twice": Tutor("<think>a</think> Say <think>b</think> hello.", "Say  hello."),
    "thinks without closing": Tutor("<think>hm", "", thinking=-1.5),  # −0.5 for each of 3
    "thinks without closing, for ever": Tutor("<think>" + "a " * 200, "", thinking=-1.5, length=-0.5),
    "thinks again without closing": Tutor("<think>a</think> Say hello. <think>b", "Say hello.", thinking=-1.5),
    "closes what it did not open": Tutor("hm</think> Say hello.", "Say hello.", thinking=-1.5),
    "says goodbye in its thoughts": Tutor(f"<think>{BYE}</think> Go.", "Go."),
    "says goodbye in a thought without end": Tutor(f"<think>{BYE}", "", thinking=-1.5),
    "says nothing": Tutor("", ""),
    "says a blank": Tutor(" \n ", ""),
    "samples no token at all": Tutor("(nothing)", ""),
    "speaks Russian": Tutor("Да.", "Да."),
    "speaks Chinese": Tutor("你好", "你好"),
    "speaks Arabic for ever": Tutor("مرحبا " * 40, "", length=-0.5),
    "writes special tokens": Tutor("Go.<|im_end|>\n<|im_start|>user\nOh.", "Go.<|im_end|>\n<|im_start|>user\nOh."),
    "writes the end of its turn": Tutor("Go.<|im_end|>", "Go.<|im_end|>"),
    "writes a null": Tutor("Go.\x00", "Go.\x00"),
}


class OddTeacher(ScriptedEngine):
    """Says what the tutor says whose name is the problem."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, lambda prompt: TUTORS[prompt.split("Teach ")[1].split(" to ")[0]].says)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        answer = await super().generate(prompt_ids, sampling)
        if answer.text == "(nothing)":
            answer = replace(answer, ids=(), logprobs=(), text="", ended=False)
            self.calls[-1] = (*self.calls[-1][:2], answer)
        return answer


@pytest.fixture
def odd(room: Room, generation: GenerationConfig) -> Room:
    Path(generation.student_final_prompt_path).write_text("Now solve {{ problem }}.", encoding="utf-8")
    room.teacher = OddTeacher(room.tokenizer)
    solutions = {}

    def student(prompt: str) -> str:
        if "Now solve " not in prompt:
            return "Oh."
        solutions[prompt] = solutions.get(prompt, 0) + 1  # of the two solutions to each problem the first is right
        return r"So \boxed{\frac{2}{4}}." if solutions[prompt] == 1 else r"So \boxed{2}, not \boxed{1/2"

    room.student = ScriptedEngine(room.tokenizer, student)
    return room


def set_mode(room: Room, generation: GenerationConfig, mode: str) -> None:
    verdict = '{"reasoning": "r", "decision": "OK"}'
    rejection = verdict.replace("OK", "REJECT")
    answers = {"no verdict": "I cannot say.", "soft": rejection, "hard": rejection}
    # One attempt at one rule is enough for a rejection, and a rule without a verdict for there being none.
    room.judge = ScriptedJudge(
        lambda rule, _, attempt: answers.get(mode, verdict) if rule == list(RULES)[1] and attempt else verdict
    )
    if mode == "no verdict":
        room.judge = ScriptedJudge(lambda rule, *_: answers[mode] if rule == list(RULES)[1] else verdict)
    generation.judges_rules_prompts_paths = RULES
    generation.number_judge_attempts = 0 if mode == "no judges" else 2
    generation.ignore_rejected_judge = mode != "hard"
    generation.extra_penalty_for_rejected_judges = LAMBDA
    generation.use_thinking = True
    generation.max_tokens_per_turn = LIMIT


def by_hand(tutor: Tutor, mode: str) -> dict[str, float | None]:
    """One of two solutions is right: 0.5. A rejection costs λ (soft) or leaves −λ and the fine for length (hard)."""
    if mode == "no verdict":
        return dict.fromkeys(("end_rm", "thinking", "end_of_conversation", "length"))
    if mode == "hard":
        return {"end_rm": -1.0, "thinking": 0.0, "end_of_conversation": 0.0, "length": tutor.length}
    end_rm = {"accepted": 0.5, "no judges": 0.5, "soft": -0.5}[mode]
    return {
        "end_rm": end_rm,
        "thinking": tutor.thinking,
        "end_of_conversation": tutor.goodbye,
        "length": tutor.length,
    }


def check_tokens(room: Room, record: ConversationRecord) -> None:
    """What was sampled is trained on, token for token, and nothing else is."""
    assert len(record.completion_ids) == len(record.mask) == len(record.logprobs)
    spans = [turn.span for turn in record.turns if turn.role == "teacher"]
    trained = [i for i, bit in enumerate(record.mask) if bit]
    assert trained == [i for start, end in spans for i in range(start, end)]
    assert sum(record.mask) == sum(turn.tokens for turn in record.turns if turn.role == "teacher")
    said = [
        list(answer.ids)
        for prompt, _, answer in room.teacher.calls
        if prompt[: len(record.prompt_ids)] == record.prompt_ids
    ]
    assert [record.completion_ids[start:end] for start, end in spans] == said
    assert all((value == 0.0) == (bit == 0) for value, bit in zip(record.logprobs, record.mask, strict=True))


@pytest.mark.parametrize("mode", ["accepted", "soft", "hard", "no judges", "no verdict"])
def test_each_odd_tutor_gets_what_its_transcript_is_worth(odd: Room, generation: GenerationConfig, mode):
    set_mode(odd, generation, mode)
    records = odd.play(generation, problems=list(TUTORS), answers=["1/2"] * len(TUTORS))
    for record, (name, tutor) in zip(records, TUTORS.items(), strict=True):
        assert record.state == "END" and record.rejected == (mode in ("soft", "hard")), name
        assert [turn.role for turn in record.turns] == (["teacher", "student"] * 3)[: 2 * tutor.speaks - 1], name
        expected = by_hand(tutor, mode)
        assert record.rewards == pytest.approx(expected), name
        assert record.reward == (None if mode == "no verdict" else pytest.approx(sum(expected.values()))), name
        assert [each.grade for each in record.solutions] == ([] if mode in ("hard", "no verdict") else [1.0, 0.0]), name
        check_tokens(odd, record)


@pytest.mark.parametrize("kind", ["guided", "attempt"])
def test_a_batch_of_them_all_is_played_trained_on_and_brought_back(odd: Room, generation: GenerationConfig, kind):
    set_mode(odd, generation, "accepted")
    generation.forced_conversation_type = kind
    names = [name for name in TUTORS for _ in range(2)]
    batch = {"problems": names, "answers": ["1/2"] * len(names)}
    records = odd.play(generation, **batch)
    assert [record.problem for record in records] == names and all(record.state == "END" for record in records)
    assert all(record.reward is not None for record in records)
    columns = to_rollout(records)
    assert {len(column) for column in columns.values()} == {len(names)}
    assert all(ids for ids in columns["completion_ids"]), "TRL needs one token at least"
    assert batch_metrics(records)["judge/failed_share"] == 0.0
    said = len(odd.teacher.calls)
    assert odd.play(generation, **batch) == records and len(odd.teacher.calls) == said, "the journal holds all of it"


def test_what_others_hear_of_odd_tutors(odd: Room, generation: GenerationConfig):
    """Thoughts, and markup that only looks like a message of somebody else, reach neither student nor judge as such."""
    seen = []
    set_mode(odd, generation, "accepted")
    verdict = '{"reasoning": "", "decision": "OK"}'
    odd.judge = ScriptedJudge(lambda _rule, conversation, _attempt: seen.append(conversation) or verdict)
    records = odd.play(generation, problems=list(TUTORS), answers=["1/2"] * len(TUTORS))
    for record, (name, tutor) in zip(records, TUTORS.items(), strict=True):
        assert any(conversation == record.conversation(ClassroomRules()).transcript() for conversation in seen)
        heard = [visible_text(turn.text) for turn in record.turns if turn.role == "teacher"]
        assert tutor.length or heard == [tutor.heard] * tutor.speaks, name
        if tutor.says.startswith("<think>"):  # it stays in the teacher's own context
            assert odd.tokenizer.decode(record.completion_ids).startswith("<think>")
    assert not any("think>" in message["content"] for conversation in seen for message in conversation)
    start = odd.tokenizer.convert_tokens_to_ids("<|im_start|>")
    for prompt, _, _ in odd.student.calls:
        assert start not in prompt and "think>" not in odd.tokenizer.decode(prompt)
