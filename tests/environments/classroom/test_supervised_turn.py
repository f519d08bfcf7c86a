"""The supervised turn: what the student hears, which tokens are trained on in which row, and what stays as it is
without a supervisor."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig, SupervisionConfig
from classroom_rl.config.values import END_OF_CONVERSATION, PHASED
from classroom_rl.environments.classroom.environment import PHASES
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.supervised_turn import target_of
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.rows import CORRECTION, DRAFT, POLICY, TrainingRow, message_numbers, rows_of
from classroom_rl.rollout.supervision import OBSERVE, REPLACE, RETRY, SampledDraft, is_supervised
from classroom_rl.rollout.tokens import Turn
from classroom_rl.trainer.metrics import supervision_metrics
from tests.support.scripted_engine import ScriptedJudge
from tests.support.scripted_room import SCORES, Room
from tests.support.supervised_room import CORRECTION as CORRECTED
from tests.support.supervised_room import (
    LEAK,
    NO_VERDICT,
    VALID,
    DrawnTeacher,
    ScriptedSupervisor,
    TextTeacher,
    play,
    rows_by_kind,
    supervising,
)

WRONG, FINE = "It is wrong.", "Say hello."
PENALTY = SupervisionConfig().penalties["leak"]
TOKENS = ("prompt_ids", "completion_ids", "mask", "logprobs")


def trained_ids(row: TrainingRow) -> list[int]:
    """The tokens of a row beside a conversation that are trained on."""
    return row.completion_ids[_start(row) :]


def trained_logprobs(row: TrainingRow) -> list[float]:
    return row.logprobs[_start(row) :]


def context_of(row: TrainingRow) -> list[int]:
    """What stands before them, as the policy saw it."""
    return row.prompt_ids + row.completion_ids[: _start(row)]


def _start(row: TrainingRow) -> int:
    trained = [bit or target for bit, target in zip(row.mask, row.target, strict=True)]
    assert all(trained[trained.index(1) :])
    return trained.index(1)


def tokens_of(record: ConversationRecord) -> list:
    return [getattr(record, name) for name in TOKENS]


def alone(tokenizer, folder: Path, generation: GenerationConfig, *lines: str) -> ConversationRecord:
    """The same conversation without a supervisor."""
    room = Room(tokenizer, folder)
    room.teacher = DrawnTeacher(tokenizer, lines)
    return room.play(generation)[0]


# Observe ------------------------------------------------------------------------------------------------------------


def test_an_observed_teacher_is_heard_as_it_speaks(room: Room, generation: GenerationConfig, tmp_path: Path) -> None:
    lines = (FINE, FINE, WRONG, FINE, FINE)
    record = play(room, supervising(generation), *lines)
    other = alone(room.tokenizer, tmp_path / "alone", generation, *lines)
    assert tokens_of(record) == tokens_of(other) and other.branches == []
    assert [replace(turn, review=None) for turn in record.turns] == other.turns
    assert [turn.review and turn.review.valid for turn in record.turns] == [True, None, False, None, True]
    assert record.turns[2].review == replace(LEAK, penalty=PENALTY) and record.turns[0].review.penalty == 0
    assert any(WRONG in room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls)
    assert record.supervised and not other.supervised
    assert rows_of(record)[0] == rows_of(other)[0]
    (row,) = rows_of(record)[1:]
    assert (row.kind, row.message, row.reward, set(row.mask)) == (CORRECTION, 1, None, {0})
    assert context_of(row) == room.teacher.calls[1][0], "what the teacher had read when it erred"
    assert room.tokenizer.decode(trained_ids(row)) == f"{CORRECTED}<|im_end|>"
    assert set(row.logprobs) == {0.0} and set(row.messages) == {-1}


def test_the_supervisor_is_shown_what_the_student_hears(room: Room, generation: GenerationConfig) -> None:
    play(room, supervising(generation), "<think>hm</think>Go on.", "", "so " * 60)
    first, second, _ = room.supervisor.asked
    assert (first.message, first.conversation, first.problem, first.answer) == ("Go on.", [], "fractions", "1/2")
    assert [message["content"] for message in second.conversation] == ["Go on.", "Hello."]
    assert [about.cut for about in room.supervisor.asked] == [False, True, True]
    assert len(second.facts.personas) == 2 and second.facts.max_turns == 5


# Retry --------------------------------------------------------------------------------------------------------------


def test_a_rejected_draft_was_never_said(room: Room, generation: GenerationConfig, tmp_path: Path) -> None:
    bad = f"{WRONG} Bye. {END_OF_CONVERSATION}"
    record = play(room, supervising(generation, on_invalid=RETRY), bad, FINE)
    other = alone(room.tokenizer, tmp_path / "alone", generation, FINE)
    assert tokens_of(record) == tokens_of(other), "its end ends nothing, and it stands nowhere in the context"
    assert len(record.turns) == 5 and [turn.span for turn in record.turns] == [turn.span for turn in other.turns]
    assert not any("wrong" in room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls)
    first = record.turns[0]
    assert first.text == FINE and [draft.text for draft in first.drafts] == [bad] and not first.replaced
    assert first.review.valid and first.drafts[0].review == replace(LEAK, penalty=PENALTY)
    prompt, _, sampled = room.teacher.calls[0]
    (draft,), (correction,) = rows_by_kind(record)[DRAFT], rows_by_kind(record)[CORRECTION]
    assert (context_of(draft), trained_ids(draft)) == (prompt, list(sampled.ids))
    assert (draft.logprobs, set(draft.mask), set(draft.target)) == (list(sampled.logprobs), {1}, {0})
    assert (draft.message, draft.reward, set(draft.messages)) == (0, PENALTY, {0})
    assert context_of(correction) == prompt and room.tokenizer.decode(trained_ids(correction)).startswith(CORRECTED)
    assert first.drafts[0].tokens == len(sampled.ids)


@pytest.mark.parametrize("show_critique", [False, True])
def test_every_draft_is_sampled_anew(room: Room, generation: GenerationConfig, show_critique: bool) -> None:
    rules = supervising(generation, on_invalid=RETRY, show_critique=show_critique, max_retries=2)
    play(room, rules, WRONG, WRONG, FINE, fixed_seeds=True)
    samplings = [sampling for _, sampling, _ in (*room.teacher.calls, *room.student.calls)]
    assert len({sampling.draw for sampling in samplings}) == len(samplings) == 7
    assert len({sampling.seed for sampling in samplings}) == 7


def test_a_message_written_after_a_critique_is_a_row_of_its_own(room: Room, generation: GenerationConfig) -> None:
    rules = supervising(generation, on_invalid=RETRY, show_critique=True)
    record = play(room, rules, WRONG, FINE)
    (before, _, rejected), (hinted, _, accepted) = room.teacher.calls[:2]
    hint = room.tokenizer.decode(hinted[len(before) :])
    assert hinted[: len(before)] == before and hint.startswith(f"{WRONG}<|im_end|>")
    assert LEAK.critique in hint and hint.endswith("<|im_start|>assistant\n")
    (policy,), (draft,) = rows_by_kind(record)[POLICY], rows_by_kind(record)[DRAFT]
    assert (context_of(policy), trained_ids(policy)) == (hinted, list(accepted.ids))
    assert (trained_logprobs(policy), set(policy.target), policy.reward) == (list(accepted.logprobs), {0}, 0.0)
    assert (context_of(draft), trained_ids(draft)) == (before, list(rejected.ids))
    assert record.turns[0].span is None and not record.turns[0].replaced
    length = len(accepted.ids)
    assert record.completion_ids[:length] == list(accepted.ids) and set(record.mask[:length]) == {0}
    assert set(record.logprobs[:length]) == {0.0}
    assert sum(record.mask) == 2 * length, "the other two messages were sampled in the conversation"
    assert not any(LEAK.critique in room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls)
    assert room.teacher.calls[2][0] == record.prompt_ids + record.completion_ids[: record.turns[2].span[0]]


@pytest.mark.parametrize("retries", [1, 2])
@pytest.mark.parametrize("show_critique", [False, True])
def test_the_last_draft_enters(room: Room, generation, retries: int, show_critique: bool) -> None:
    rules = supervising(generation, on_invalid=RETRY, max_retries=retries, show_critique=show_critique)
    record = play(room, replace(rules, max_turns=1), WRONG)
    (turn,) = record.turns
    assert len(room.teacher.calls) == retries + 1 == len(turn.drafts) + 1
    assert turn.text == WRONG and turn.review.penalty == PENALTY
    kinds = {kind: len(rows) for kind, rows in rows_by_kind(record).items()}
    expected = {DRAFT: retries, POLICY: int(show_critique), CORRECTION: 1}
    assert kinds == {kind: count for kind, count in expected.items() if count}, "equal corrections are one target"
    hints = [len(prompt) - len(record.prompt_ids) for prompt, _, _ in room.teacher.calls]
    assert (len(set(hints)) == retries + 1) if show_critique else set(hints) == {0}


def test_a_long_critique_takes_room_in_the_context_and_none_of_the_message(room: Room, generation) -> None:
    """The message may have `max_tokens_per_turn` tokens, however long the critique is, if the context has room."""
    long = replace(LEAK, critique="It tells all. " * 20)
    room.supervisor = ScriptedSupervisor(lambda about: long if "wrong" in about.message else VALID)
    rules = supervising(generation, on_invalid=RETRY, show_critique=True)
    record = play(room, replace(rules, max_turns=1), f"{WRONG} " + "so " * 60, FINE)
    (before, sampling, _), (hinted, again, _) = room.teacher.calls
    assert len(hinted) - len(before) > 100 and sampling.max_tokens == again.max_tokens == 48
    assert record.turns[0].text == FINE


@pytest.mark.parametrize("spare", [0, 1])
def test_without_room_for_the_critique_the_draft_is_accepted(
    room: Room, tokenizer, generation, tmp_path, spare
) -> None:
    rules = replace(supervising(generation, on_invalid=RETRY, show_critique=True), max_turns=1)
    free = play(Room(tokenizer, tmp_path / "free"), rules, WRONG, FINE)
    hinted = next(len(context_of(row)) for row in rows_by_kind(free)[POLICY])
    record = play(room, replace(rules, max_tokens_in_conversation=hinted + 1 + spare), WRONG, "so " * 60)
    assert len(room.teacher.calls) == 1 + spare
    if spare:  # room for one token, and for the end that it leaves out
        assert room.teacher.calls[1][1].max_tokens == 1 and len(record.turns[0].drafts) == 1
    else:
        assert record.turns[0].text == WRONG and record.turns[0].drafts == () and record.turns[0].span is not None
        assert POLICY not in rows_by_kind(record)


def test_a_cut_draft_is_shown_with_its_end(room: Room, generation: GenerationConfig) -> None:
    rules = supervising(generation, on_invalid=RETRY, show_critique=True)
    record = play(room, replace(rules, max_turns=1), f"{WRONG} " + "so " * 60, FINE)
    (draft,), (policy,) = rows_by_kind(record)[DRAFT], rows_by_kind(record)[POLICY]
    end = room.teacher.frame.turn_end_id
    end_at = len(context_of(draft)) + 48
    assert len(trained_ids(draft)) == 48 and context_of(policy)[end_at] == end != trained_ids(draft)[-1]


# Replace ------------------------------------------------------------------------------------------------------------


def test_a_correction_takes_the_place_of_the_draft(room: Room, generation: GenerationConfig) -> None:
    record = play(room, supervising(generation, on_invalid=REPLACE), FINE, FINE, WRONG, FINE)
    turn, next_turn = record.turns[2], record.turns[4]
    assert (turn.text, turn.replaced, turn.span, turn.tokens) == (CORRECTED, True, None, 0)
    assert turn.review.penalty == PENALTY and [draft.text for draft in turn.drafts] == [WRONG]
    prompt, _, sampled = room.teacher.calls[1]
    (draft,), (correction,) = rows_by_kind(record)[DRAFT], rows_by_kind(record)[CORRECTION]
    assert (context_of(draft), trained_ids(draft)) == (prompt, list(sampled.ids))
    assert trained_logprobs(draft) == list(sampled.logprobs)
    assert (draft.reward, draft.message, context_of(correction)) == (PENALTY, 1, prompt)
    start = len(prompt) - len(record.prompt_ids)
    end = start + len(trained_ids(correction))
    assert record.completion_ids[start:end] == trained_ids(correction) and set(record.mask[start:end]) == {0}
    assert room.teacher.calls[2][0] == record.prompt_ids + record.completion_ids[: next_turn.span[0]]
    assert CORRECTED in room.tokenizer.decode(room.student.calls[1][0])
    assert not any("wrong" in room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls)
    assert len(rows_of(record)) == 3


def test_the_end_in_a_correction_ends_the_dialogue(room: Room, generation: GenerationConfig) -> None:
    bye = replace(LEAK, correction=f"Bye. {END_OF_CONVERSATION}")
    room.supervisor = ScriptedSupervisor(lambda _: bye)
    record = play(room, supervising(generation, on_invalid=REPLACE), WRONG)
    assert len(record.turns) == 1 and record.state == "END" and sum(record.mask) == 0


@pytest.mark.parametrize(
    ("line", "review"),
    [(WRONG, replace(LEAK, correction=None)), ("<think>It is wrong", LEAK)],
    ids=["no correction", "a correction of an open thought"],
)
def test_without_a_correction_that_can_be_used_the_draft_is_heard(room: Room, generation, line: str, review) -> None:
    room.supervisor = ScriptedSupervisor(lambda _: review)
    record = play(room, supervising(generation, on_invalid=REPLACE), line)
    for turn in record.turns[::2]:
        assert (turn.text, turn.replaced, turn.review.penalty) == (line, False, PENALTY) and turn.span is not None
    assert record.branches == []


@pytest.mark.parametrize("mode", [OBSERVE, REPLACE])
def test_a_correction_that_does_not_fit_is_not_used(room: Room, tokenizer, generation, tmp_path, mode: str) -> None:
    """A row longer than the teacher's context could not be trained on."""
    rules = replace(supervising(generation, on_invalid=mode), max_turns=1)
    prompt = len(play(Room(tokenizer, tmp_path / "free"), rules, FINE).prompt_ids)
    room.supervisor = ScriptedSupervisor(lambda _: LEAK)
    needed = len(tokenizer.encode(CORRECTED)) + 1
    for spare in (-1, 0):
        rules = replace(rules, max_tokens_in_conversation=prompt + needed + spare)
        record = play(room, rules, "No", request_id=f"r{spare}")
        assert len(record.prompt_ids) + len(record.completion_ids) <= rules.max_tokens_in_conversation
        assert [row.kind for row in rows_of(record)].count(CORRECTION) == (spare == 0)
        assert record.turns[0].replaced is (spare == 0 and mode == REPLACE)


@pytest.mark.parametrize("forced", [False, True])
def test_a_thought_stays_as_context(room: Room, generation: GenerationConfig, forced: bool) -> None:
    opened = "" if forced else "<think>"
    rules = replace(supervising(generation, on_invalid=REPLACE), use_thinking=True, force_thinking=forced, max_turns=3)
    record = play(room, rules, f"{opened}hm</think>\n{WRONG}")
    (correction,) = rows_by_kind(record)[CORRECTION][:1]
    context = room.tokenizer.decode(context_of(correction))
    assert context.endswith("<think>\nhm</think>\n" if forced else "<think>hm</think>\n")
    assert room.tokenizer.decode(trained_ids(correction)) == f"{CORRECTED}<|im_end|>"
    text = room.tokenizer.decode(record.completion_ids)
    assert text.startswith(f"{opened}hm</think>\n{CORRECTED}<|im_end|>")
    assert record.turns[0].text == CORRECTED and sum(record.mask) == 0
    assert "hm" not in room.tokenizer.decode(room.student.calls[0][0])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("wrong", ""),
        ("<think>a</think>wrong", "<think>a</think>"),
        ("<think>a</think> <think>b</think>\n\nwrong", "<think>a</think> <think>b</think>\n\n"),
        ("<think>a</think>", "<think>a</think>"),
        ("<think>a</think>wrong<think>b</think> it is", "<think>a</think>"),
        ("wrong <think>a</think> it is", ""),
        ("<think>a</think>wrong <think>b", "<think>a</think>"),
        ("wrong <think>b", None),
        ("<think>b", None),
    ],
)
def test_what_was_said_is_no_context_of_its_correction(tokenizer, text: str, kept: str | None) -> None:
    draft = SampledDraft(Turn("teacher", text), tuple(tokenizer.encode(f"{text}<|im_end|>")))
    target = target_of(draft, CORRECTED, tokenizer, 99)
    assert (None if target is None else tokenizer.decode(target[0])) == kept
    if target is not None:
        assert target[1][-1] == 99 and tokenizer.decode(target[1][:-1]) == CORRECTED


# No verdict ---------------------------------------------------------------------------------------------------------


def raises(_: object) -> Review:
    raise ValueError("odd \ud800")


@pytest.mark.parametrize("mode", [OBSERVE, RETRY, REPLACE])
@pytest.mark.parametrize("answer", [lambda _: NO_VERDICT, raises, lambda _: replace(LEAK, category="unheard of")])
def test_no_verdict_changes_nothing(room: Room, generation, tmp_path: Path, mode: str, answer) -> None:
    room.supervisor, room.turn_rewards = ScriptedSupervisor(answer), ("supervisor",)
    record = play(room, supervising(generation, on_invalid=mode), WRONG)
    other = alone(room.tokenizer, tmp_path / "alone", generation, WRONG)
    assert tokens_of(record) == tokens_of(other) and record.branches == [] and len(rows_of(record)) == 1
    assert [replace(turn, review=None) for turn in record.turns] == other.turns
    reviews = [turn.review for turn in record.turns[::2]]
    assert {(review.valid, review.penalty, review.correction) for review in reviews} == {(None, None, None)}
    assert all(review.error for review in reviews) and record.turn_rewards == {"supervisor": [None] * 3}
    metrics = supervision_metrics([record])
    assert (metrics["supervision/no_verdict_share"], metrics["supervision/reviewed_share"]) == (1, 0)
    assert "supervision/process_reward" not in metrics and "supervision/valid_share" not in metrics


# Which conversations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "step", "least", "most"),
    [
        ({}, 10**6, 400, 400),
        ({"share": 0.0}, 0, 0, 0),
        ({"share": 0.5}, 0, 150, 250),
        ({"anneal_steps": 10}, 0, 400, 400),
        ({"anneal_steps": 10}, 5, 150, 250),
        ({"anneal_steps": 10}, 9, 10, 80),
        ({"anneal_steps": 10}, 10, 0, 0),
        ({"anneal_steps": 10}, 1000, 0, 0),
    ],
)
def test_a_share_of_the_problems_is_supervised_that_may_fall_to_nothing(options, step, least, most) -> None:
    assert least <= sum(supervised_problems(step, **options)) <= most


def test_which_problems_are_supervised_is_drawn_for_each_step() -> None:
    first, again, next_step = (supervised_problems(step, share=0.5) for step in (0, 0, 1))
    assert first == again != next_step


def supervised_problems(step: int, **options) -> list[bool]:
    problems = [Problem.of(f"problem {number}", "") for number in range(400)]
    return [is_supervised(SupervisionConfig(**options), problem, 1, step) for problem in problems]


def test_a_group_is_supervised_as_one_with_the_setup_that_it_would_have_had(
    room: Room, tokenizer, generation, tmp_path: Path
) -> None:
    problems = [f"problem {number}" for number in range(6) for _ in range(2)]
    request = {"problems": problems, "answers": [""] * len(problems)}
    room.supervisor = ScriptedSupervisor()
    room.teacher = DrawnTeacher(tokenizer, [FINE])
    records = room.play(supervising(generation, share=0.5), supervised=True, **request)
    flags = [record.supervised for record in records]
    assert flags[::2] == flags[1::2] and set(flags) == {True, False}
    for record in records:
        assert all((turn.review is not None) is record.supervised for turn in record.turns[::2])
    others = Room(tokenizer, tmp_path / "alone").play(generation, **request)
    for record, other in zip(records, others, strict=True):
        assert [turn.persona for turn in record.turns] == [turn.persona for turn in other.turns]
        assert (record.student_name, record.type) == (other.student_name, other.type)


def test_a_request_that_does_not_ask_for_it_is_not_supervised(room: Room, generation, tmp_path: Path) -> None:
    record = play(room, supervising(generation, on_invalid=REPLACE), WRONG, supervised=False)
    assert room.supervisor.asked == [] and not record.supervised and record.branches == []
    assert tokens_of(record) == tokens_of(alone(room.tokenizer, tmp_path / "alone", generation, WRONG))


def test_a_request_without_supervision_is_the_request_that_it_was() -> None:
    """Trainings and evaluations of earlier versions go on: the digest is that of before there were supervisors."""
    body = {"problems": ["fractions"], "answers": ["1/2"], "request_id": "r", "seed": 1, "step": 0}
    digest = "8eb1eb4524044172f8fda0f89ef04c82cb88a1e76bdd77c1ada3d0e635c49edf"
    assert SampleRequest(**body).digest == digest == SampleRequest(**body, judge_again=True).digest
    assert SampleRequest(**body, supervised=True).digest != digest


def test_reviews_are_a_part_of_the_dialogue_phase(room: Room, generation: GenerationConfig) -> None:
    rules = replace(supervising(generation, on_invalid=RETRY), schedule=PHASED)
    record = play(room, rules, WRONG, FINE)
    assert record.state == "END" and len(room.supervisor.asked) == 4
    assert room.woken[:1] == [PHASES[1].roles] and "supervisor" in PHASES[0].roles
    assert room.woken.count(PHASES[0].roles) <= 1, "not left for a review"


# Turn rewards -------------------------------------------------------------------------------------------------------


def test_turn_rewards_stand_beside_the_teachers_messages(room: Room, generation: GenerationConfig) -> None:
    scores = [[1, 0.5, None], [0, 0.5, None]]
    room.judge = ScriptedJudge(lambda rule, dialogue, attempt: json.dumps(SCORES | {"turn_scores": scores[attempt]}))
    room.turn_rewards = ("supervisor", "judge", "length")
    lines = (WRONG, FINE, FINE, "so " * 60)
    record = play(room, replace(supervising(generation, on_invalid=RETRY), number_judge_attempts=2), *lines)
    assert record.turn_rewards == {
        "supervisor": [0.0, 0.0, 0.0],
        "judge": [0.5, 0.5, None],
        "length": [0.0, -0.5, -0.5],
    }
    assert all(len(values) == len(message_numbers(record)) for values in record.turn_rewards.values())
    room.supervisor = None
    room.teacher = DrawnTeacher(room.tokenizer, [FINE])
    assert room.play(generation, request_id="s")[0].turn_rewards["supervisor"] == [None] * 3


# Teachers of other kinds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [OBSERVE, RETRY, REPLACE])
@pytest.mark.parametrize("show_critique", [False, True])
def test_a_teacher_that_works_on_text(room: Room, generation, mode: str, show_critique: bool) -> None:
    room.teacher, room.supervisor = TextTeacher([WRONG, FINE]), ScriptedSupervisor()
    room.turn_rewards = ("supervisor",)
    record = room.play(supervising(generation, on_invalid=mode, show_critique=show_critique), supervised=True)[0]
    first = record.turns[0]
    assert record.state == "END" and record.reward == 0.7 and tokens_of(record) == [[]] * 4 and record.branches == []
    assert first.text == {OBSERVE: WRONG, RETRY: FINE, REPLACE: CORRECTED}[mode]
    assert record.turn_rewards["supervisor"] == [0.0 if mode == RETRY else PENALTY, 0.0, 0.0]
    assert len(first.drafts) == (mode != OBSERVE) and first.replaced is (mode == REPLACE)
    assert all(row.completion_ids == [] for row in rows_of(record))
    (before, _), (again, sampling), *_ = room.teacher.calls
    if mode == RETRY:
        hint_messages = [{"role": "assistant", "content": WRONG}, {"role": "user", "content": again[-1]["content"]}]
        assert again == ([*before, *hint_messages] if show_critique else before)
        assert not show_critique or LEAK.critique in again[-1]["content"]
        assert sampling.draw[1] == 1
    else:
        assert len(again) == 3


def test_messages_of_the_prompt_template_have_no_number(room: Room, socratic: GenerationConfig) -> None:
    room.turn_rewards = ("supervisor", "judge")
    scores = [0.25, 1, 0.5]
    room.judge = ScriptedJudge(lambda *_: json.dumps(SCORES | {"turn_scores": scores}))
    rules = replace(supervising(socratic, on_invalid=RETRY), max_turns=6)
    record = play(room, rules, FINE, FINE, FINE, WRONG, FINE)
    assert [turn.given for turn in record.turns[:4]] == [True, True, False, False]
    numbers = message_numbers(record)
    assert numbers == {3: 0, 5: 1} and record.turns[1].review is None
    (draft,), policy_row = rows_by_kind(record)[DRAFT], rows_of(record)[0]
    assert draft.message == 0 and room.supervisor.asked[0].conversation[1]["content"] == "What is asked?"
    for index, number in numbers.items():
        assert set(policy_row.messages[slice(*record.turns[index].span)]) == {number}
    assert {number for number, bit in zip(policy_row.messages, policy_row.mask, strict=True) if not bit} == {-1}
    assert record.turn_rewards == {"supervisor": [0.0, 0.0], "judge": [1, 0.5]}, "the judge also scored the template's"
