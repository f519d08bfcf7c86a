"""The rewards, compared with values worked out by hand: of conversations put together here, and of odd tutors that are
played."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.values import END_OF_CONVERSATION, LEDGER, STUDENT
from classroom_rl.environments.classroom.conversation import ClassroomRules, Conversation, Solution, State
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.rewards import REWARDS, pedagogical, reward_of, turn_reward_of
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.errors import DataError
from classroom_rl.judges.post_test.records import GIVEN, MISSED, PRODUCED, ExamAnswer, LedgerEntry, PostTest
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.results.rollout_files import read_records, table_of, write_table
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.runner import weighted_sum
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn
from tests.environments.classroom.conftest import ACCEPTS, REJECTS
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import Room

SCORING = ("pedagogical_eval",)
DECIDING = ("does_not_leak_answer", "follows_pedagogical_values")
SOFT, HARD = True, False


def finished(
    teacher: list[Turn] | list[str] = ("Go on.",),
    verdicts: list[Verdict] = (),
    grades: list[float] = (),
    post_test: PostTest | None = None,
    scored_by: str = "",
    **rules,
) -> Conversation:
    """A conversation on its way out, put together by hand."""
    turns = [turn if isinstance(turn, Turn) else Turn("teacher", turn, tokens=5) for turn in teacher]
    conversation = Conversation(
        "c",
        Problem.of("p"),
        Setup(ConversationType.GUIDED, None, ()),
        ClassroomRules(post_test=scored_by, **rules),
        turns=turns,
    )
    conversation.verdicts = list(verdicts)
    conversation.solutions = [Solution("", grade) for grade in grades]
    conversation.post_test = post_test
    conversation.state = State.REWARD_TURN
    return conversation


def scored(*attempts: Scores | None, mode: bool = HARD, **rules) -> Conversation:
    verdicts = [Verdict("pedagogical_eval", i, scores=s, error=None if s else "?") for i, s in enumerate(attempts)]
    return finished(verdicts=verdicts, judge_rules=SCORING, ignore_rejected_judge=mode, **rules)


def decided(accepted: bool | None, mode: bool, **more) -> Conversation:
    verdicts = [
        Verdict(DECIDING[0], 0, accepted=True),
        Verdict(DECIDING[1], 0, accepted=accepted, error=None if accepted is not None else "timeout"),
    ]
    return finished(verdicts=verdicts, judge_rules=DECIDING, ignore_rejected_judge=mode, **more)


# The language tutor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [SOFT, HARD])
@pytest.mark.parametrize(
    ("scores", "reward"),
    [
        (Scores(1, 1, 10), 1.0),
        (Scores(1, 0, 0), 0.4),
        (Scores(0, 1, 0), 0.4),
        (Scores(0.5, 0.25, 5), 0.4),  # 0.2 + 0.1 + 0.1
        (Scores(2 / 3, 1 / 3, 7), 0.54),  # 0.26667 + 0.13333 + 0.14
        (Scores(1 / 3, 1 / 7, 9), 0.3705),  # 0.133333 + 0.057143 + 0.18
        (Scores(0.75, 0, 0), 0.3),  # on the threshold is not under it
    ],
)
def test_pedagogical_is_the_weighted_sum_of_the_scores(scores, reward, mode):
    assert pedagogical(scored(scores, mode=mode)) == reward


@pytest.mark.parametrize(
    ("scores", "mode", "rules", "reward"),
    [
        (Scores(0.7, 0, 0), SOFT, {}, 0.03),  # 0.28 is under 0.3: less 0.25
        (Scores(0.7, 0, 0), HARD, {}, 0.0),
        (Scores(0.7, 0, 0), SOFT, {"extra_penalty_for_rejected_judges": 0.1}, 0.18),
        (Scores(0.7, 0, 0), HARD, {"extra_penalty_for_rejected_judges": 0.1}, 0.0),
        (Scores(0.5, 0, 0), SOFT, {}, 0.0),  # 0.2 − 0.25 is under 0
        (Scores(0.7, 0, 0), SOFT, {"low_score_threshold": 0.28}, 0.28),
        (Scores(0.7, 0, 0), HARD, {"low_score_threshold": 0.0}, 0.28),
        (Scores(1, 1, 5), SOFT, {"low_score_threshold": 0.95}, 0.65),
    ],
)
def test_a_low_score_costs_the_penalty_or_everything(scores, mode, rules, reward):
    assert pedagogical(scored(scores, mode=mode, **rules)) == reward


def test_attempts_are_averaged_before_the_threshold_is_asked():
    # 0.0 and 0.8 are 0.4 on average: not rejected, though one of them alone would be.
    assert pedagogical(scored(Scores(0, 0, 0), Scores(1, 1, 0), None)) == 0.4
    # 0.2 and 0.36 are 0.28 on average: the penalty comes off once.
    assert pedagogical(scored(Scores(0.5, 0, 0), Scores(0.9, 0, 0), mode=SOFT)) == 0.03


@pytest.mark.parametrize(
    ("outcomes", "capped", "reward"),
    [
        ([GIVEN, GIVEN, GIVEN, PRODUCED], True, 0.25),
        ([GIVEN, GIVEN, GIVEN, PRODUCED], False, 0.8),
        ([GIVEN, MISSED, PRODUCED, PRODUCED, PRODUCED, PRODUCED, PRODUCED, PRODUCED], True, 0.8),
        ([GIVEN], True, 0.0),
    ],
)
def test_the_ledger_caps_what_a_form_earns(outcomes, capped, reward):
    conversation = scored(Scores(1, 1, 0), mode=SOFT, ledger_caps_pedagogical=capped)
    conversation.post_test = PostTest(tuple(LedgerEntry("i", "c", outcome) for outcome in outcomes), ())
    assert pedagogical(conversation) == reward


def test_without_a_post_test_nothing_is_capped():
    assert pedagogical(scored(Scores(1, 1, 0), ledger_caps_pedagogical=True)) == 0.8


def test_pedagogical_needs_a_rule_that_scores():
    with pytest.raises(ValueError, match="a judge rule that scores"):
        pedagogical(decided(True, SOFT))
    with pytest.raises(ValueError, match="a judge rule that scores"):
        pedagogical(finished())


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 10), st.booleans(), st.floats(0, 1), st.floats(0, 1))
def test_pedagogical_stays_between_0_and_1_and_a_better_score_never_costs(a, b, c, mode, penalty, threshold):
    rules = {"mode": mode, "extra_penalty_for_rejected_judges": penalty, "low_score_threshold": threshold}
    reward = pedagogical(scored(Scores(a, b, c), **rules))
    assert 0 <= reward <= 1
    assert pedagogical(scored(Scores(1, b, c), **rules)) >= reward
    assert pedagogical(scored(Scores(a, 1, c), **rules)) >= reward
    assert pedagogical(scored(Scores(a, b, 10), **rules)) >= reward


# The maths tutor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "mode", "grades", "penalty", "reward"),
    [
        (True, HARD, [1, 0, 0, 1], 0.25, 0.5),
        (True, SOFT, [1, 1, 1, 0], 0.25, 0.75),
        (False, SOFT, [1, 1, 1, 0], 0.25, 0.5),  # 0.75 − 0.25
        (False, SOFT, [1], 0.6, 0.4),
        (False, SOFT, [0, 0], 0.25, -0.25),
        (False, HARD, [], 0.25, -0.25),
        (False, HARD, [], 0.6, -0.6),
    ],
)
def test_end_rm_is_the_share_of_right_solutions_less_the_penalty(accepted, mode, grades, penalty, reward):
    conversation = decided(accepted, mode, grades=grades, extra_penalty_for_rejected_judges=penalty)
    assert REWARDS["end_rm"](conversation) == pytest.approx(reward)


@pytest.mark.parametrize("grades", [[], [1.0, None]])
def test_end_rm_without_graded_solutions_is_an_error_and_not_a_number(grades):
    with pytest.raises(ValueError, match="graded solutions"):
        REWARDS["end_rm"](decided(True, HARD, grades=grades))


ONE, OTHER = "<think>The ending is wrong, so hint.</think>", "<think>Now ask for the next phrase.</think>"


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        (["a", "b"], 0.0),
        ([f"{ONE}a", "b"], 0.25),
        ([f"{ONE}a", f"{OTHER}b"], 0.5),
        ([f"{ONE}a", f"{ONE}b"], 0.25),  # the same thought pays once
        ([f"{ONE}a", f"{ONE}{OTHER}b"], 0.5),
        (["<think>a</think>a", "<think>b</think>b"], 0.0),  # too short
        ([f"{ONE}a", "<think>y"], -0.25),  # 0.5 × 1/2 − 0.5
        (["a</think>", "<think>b"], -1.0),
        ([f"{ONE}a{OTHER}b"], 0.5),
        ([f"{ONE}a<think>y"], -0.5),
    ],
)
def test_thinking_counts_closed_thoughts_and_fines_unbalanced_ones(texts, reward):
    assert REWARDS["thinking"](finished(texts, use_thinking=True)) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("thought", "says_something"),
    [
        ("<think></think>", False),
        ("<think> \n\t</think>", False),
        ("<think>…</think>", False),
        ("<think>_*_</think>", False),
        ("</think>a<think>", False),  # closes and opens: no thought
        ("<think><think></think></think>", False),
        ("<think></think><think>?</think>", False),
        ("<think></think><think>3 + 4 is not 8.</think>", True),
        ("<think>3 + 4 is 7.</think>", False),  # four words
        ("<think>да, но он не понял</think>", True),
        ("<think>想</think>", False),
        ("<think>他把动词放错了</think>", True),
        ("<think>A slip\nin the tense.</think>", True),
    ],
)
def test_a_thought_that_says_nothing_pays_nothing(thought, says_something):
    conversation = finished([f"{thought}Go on.", "Go on."], use_thinking=True)
    assert REWARDS["thinking"](conversation) == (0.25 if says_something else 0.0)


@pytest.mark.parametrize(
    ("texts", "reward"), [(["<think>x</think>a", "<think>y</think>b"], 0.0), (["<think>x</think>a", "b</think>"], -0.5)]
)
def test_thoughts_do_not_pay_where_the_teacher_is_not_told_to_think(texts, reward):
    assert REWARDS["thinking"](finished(texts)) == reward


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        (["a", "b"], 0.0),
        (["a", f"b {END_OF_CONVERSATION}"], 0.1),
        ([f"<think>{END_OF_CONVERSATION}</think>b"], 0.0),
        ([f"<think>{END_OF_CONVERSATION}"], 0.0),
    ],
)
def test_end_of_conversation_counts_a_goodbye_that_can_be_heard(texts, reward):
    assert REWARDS["end_of_conversation"](finished(texts)) == reward


def test_a_students_goodbye_counts_nothing():
    conversation = finished(["a"])
    conversation.turns.append(Turn("student", END_OF_CONVERSATION))
    assert REWARDS["end_of_conversation"](conversation) == 0.0


@pytest.mark.parametrize(("tokens", "reward"), [([3, 8], 0.0), ([3, 9], -0.5), ([10, 3], -0.5), ([9, 9, 9], -0.5)])
def test_length_fines_a_turn_at_its_limit_once(tokens, reward):
    turns = [Turn("teacher", "a", tokens=count) for count in tokens]
    assert REWARDS["length"](finished(turns, max_tokens_per_turn=10)) == reward


def test_length_looks_at_the_teacher_only():
    turns = [Turn("teacher", "a", tokens=3), Turn("student", "b", tokens=10)]
    assert REWARDS["length"](finished(turns, max_tokens_per_turn=10)) == 0.0


# The post-test ------------------------------------------------------------------------------------------------------


def answers(*right: bool, student: str = LEDGER) -> tuple[ExamAnswer, ...]:
    return tuple(ExamAnswer(student, i, "q", "a", is_right) for i, is_right in enumerate(right))


def test_the_post_test_pays_the_share_of_right_answers_of_the_student_that_counts():
    test = PostTest((), answers(True, False, False, True) + answers(False, student=STUDENT))
    for student, reward in ((LEDGER, 0.5), (STUDENT, 0.0)):
        assert REWARDS["post_test"](finished(post_test=test, scored_by=student)) == reward
    with pytest.raises(ValueError, match="needs a post-test"):
        REWARDS["post_test"](finished())


@pytest.mark.parametrize(
    ("accepted", "mode", "reward"), [(True, HARD, 1.0), (False, HARD, 0.0), (False, SOFT, 1.0), (None, HARD, None)]
)
def test_a_rejection_in_hard_mode_costs_the_post_test_and_no_verdict_is_no_reward(accepted, mode, reward):
    conversation = decided(accepted, mode, post_test=PostTest((), answers(True)), scored_by=LEDGER)
    assert REWARDS["post_test"](conversation) == reward


# None, and sums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(REWARDS))
@pytest.mark.parametrize(
    "conversation",
    [scored(None), scored(), decided(None, HARD), decided(None, SOFT, grades=[1.0])],
    ids=["all failed", "no attempt", "one rule failed", "one rule failed, with solutions"],
)
def test_without_a_verdict_every_reward_is_none(name, conversation):
    assert REWARDS[name](conversation) is None


@pytest.mark.parametrize("name", ["thinking", "end_of_conversation", "length"])
def test_without_judge_rules_nothing_is_missing(name):
    assert REWARDS[name](finished(["a"])) == 0.0


def test_the_weighted_sum_is_none_if_a_part_is_none():
    rewards = {"end_rm": 0.5, "length": -0.5, "thinking": 9.0}
    assert weighted_sum(rewards, {"end_rm": 2.0, "length": 1.0}) == 0.5
    assert weighted_sum(rewards | {"length": None}, {"end_rm": 2.0, "length": 1.0}) is None
    assert weighted_sum(rewards | {"thinking": None}, {"end_rm": 2.0}) == 1.0


# Odd tutors -----------------------------------------------------------------------------------------------------------

LIMIT = 48
LAMBDA = 1.0


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
    "ends at once": Tutor(END_OF_CONVERSATION, END_OF_CONVERSATION, speaks=1, goodbye=0.1),
    "ends at once with a word": Tutor(
        f"Bye! {END_OF_CONVERSATION}", f"Bye! {END_OF_CONVERSATION}", speaks=1, goodbye=0.1
    ),
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
    "says goodbye in its thoughts": Tutor(f"<think>{END_OF_CONVERSATION}</think> Go.", "Go."),
    "says goodbye in a thought without end": Tutor(f"<think>{END_OF_CONVERSATION}", "", thinking=-1.5),
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
    answers = {"no verdict": "I cannot say.", "soft": REJECTS, "hard": REJECTS}
    # One attempt at one rule is enough for a rejection, and a rule without a verdict for there being none.
    least = 0 if mode == "no verdict" else 1
    room.judge = ScriptedJudge(
        lambda rule, _, attempt: answers.get(mode, ACCEPTS) if rule == DECIDING[1] and attempt >= least else ACCEPTS
    )
    generation.judges_rules_prompts_paths = dict.fromkeys(DECIDING, "scripted")
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
    sampled = [
        list(answer.ids)
        for prompt, _, answer in room.teacher.calls
        if prompt[: len(record.prompt_ids)] == record.prompt_ids
    ]
    assert [record.completion_ids[start:end] for start, end in spans] == sampled
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
        assert [solution.grade for solution in record.solutions] == (
            [] if mode in ("hard", "no verdict") else [1.0, 0.0]
        ), name
        check_tokens(odd, record)


def test_what_others_hear_of_odd_tutors(odd: Room, generation: GenerationConfig):
    """Thoughts, and markup that only looks like a message of somebody else, reach neither student nor judge as such."""
    transcripts = []
    set_mode(odd, generation, "accepted")
    odd.judge = ScriptedJudge(lambda _rule, conversation, _attempt: transcripts.append(conversation) or ACCEPTS)
    records = odd.play(generation, problems=list(TUTORS), answers=["1/2"] * len(TUTORS))
    for record, (name, tutor) in zip(records, TUTORS.items(), strict=True):
        assert any(conversation == record.conversation(ClassroomRules()).transcript() for conversation in transcripts)
        heard = [visible_text(turn.text) for turn in record.turns if turn.role == "teacher"]
        assert tutor.length or heard == [tutor.heard] * tutor.speaks, name
        if tutor.says.startswith("<think>"):  # it stays in the teacher's own context
            assert odd.tokenizer.decode(record.completion_ids).startswith("<think>")
    assert not any("think>" in message["content"] for conversation in transcripts for message in conversation)
    start = odd.tokenizer.convert_tokens_to_ids("<|im_start|>")
    for prompt, _, _ in odd.student.calls:
        assert start not in prompt and "think>" not in odd.tokenizer.decode(prompt)


# Functions of one's own ----------------------------------------------------------------------------------------------

OWN, OF_MESSAGES = "tests.support.own_rewards:brevity", "tests.support.own_rewards:brevity_of_messages"


def test_a_reward_of_ones_own_counts_by_its_name_and_weight(room: Room, generation: GenerationConfig, tmp_path: Path):
    room.reward_weights, room.turn_rewards = {"pedagogical": 1.0, OWN: 0.5}, (OF_MESSAGES,)
    [record] = room.play(generation)
    short = pytest.approx(1 - len("Say hello.") / 100)
    assert record.rewards == {"pedagogical": 0.7, OWN: short} and record.reward == pytest.approx(0.7 + 0.45)
    assert record.turn_rewards == {OF_MESSAGES: [None, short, short]}
    write_table(tmp_path / "set.parquet", table_of([record]))
    [restored] = read_records(tmp_path / "set.parquet")
    assert restored.rewards == record.rewards and restored.turn_rewards == record.turn_rewards
    assert room.open(generation).reward(OWN, record.id) == record.rewards[OWN], "of an earlier server"


def test_without_a_verdict_a_reward_of_ones_own_is_none_too(room: Room, generation: GenerationConfig):
    room.judge = ScriptedJudge(lambda *_: "no verdict")
    room.reward_weights = {OWN: 1.0}
    [record] = room.play(generation)
    assert record.rewards == {OWN: None} and record.reward is None


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (reward_of, "silent", "silent returned 'short' for c; it must return a finite number, or None"),
        (reward_of, "broken", "broken failed on c: KeyError: 'page'"),
        (
            turn_reward_of,
            "of_first_message",
            r"returned \[1.0\] for c; .* for each of the policy's 2 messages",
        ),
    ],
)
def test_what_a_function_of_ones_own_returns_is_checked(find: Callable, name: str, message: str):
    with pytest.raises(DataError, match=message):
        find(f"tests.support.own_rewards:{name}")(finished(["Go on.", "Well."]))
