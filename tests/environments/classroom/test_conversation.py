"""The state machine: the order of states, who has the last turn, and which transitions it refuses, also under random
reviews of a supervisor."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import SupervisionConfig
from classroom_rl.config.values import END_OF_CONVERSATION, LEDGER
from classroom_rl.environments.classroom.conversation import (
    ClassroomRules,
    Conversation,
    InvalidTransition,
    Solution,
    State,
)
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.environments.classroom.supervised_turn import SupervisedTurn
from classroom_rl.judges.post_test.records import PostTest
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.supervision import ON_INVALID, SampledDraft
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn, add_tokens
from classroom_rl.rollout.trajectory import Trajectory

GUIDED, ATTEMPTED = ConversationType.GUIDED, ConversationType.ATTEMPTED
ORDER = list(State)
PROMPT = [1, 2, 3]
DEFAULT_RULES = ClassroomRules()
GOOD, BAD = Scores(1, 1, 10), Scores(0, 0, 0)


def new_conversation(kind: ConversationType = GUIDED, rules: ClassroomRules = DEFAULT_RULES) -> Conversation:
    personas = tuple(f"persona {i}" for i in range(rules.max_turns))
    return Conversation("c", Problem.of("2 + 2", "4"), Setup(kind, "Alex", personas), rules)


def started(kind: ConversationType = GUIDED, rules: ClassroomRules = DEFAULT_RULES) -> Conversation:
    conversation = new_conversation(kind, rules)
    conversation.start()
    return conversation


def teacher_says(conversation: Conversation, text: str = "Go on.", tokens: int = 1) -> Turn:
    if conversation.buffer is None:
        conversation.open_buffer(PROMPT)
    span = conversation.buffer.append_sampled([7] * tokens, [-0.5] * tokens)
    turn = Turn("teacher", text, tokens=tokens, span=span)
    conversation.add_teacher_turn(turn)
    return turn


def student_says(conversation: Conversation, text: str = "Four.", framed: int = 2) -> Turn:
    turn = Turn("student", text, persona=None if conversation.next_is_opening_attempt else conversation.next_persona)
    conversation.add_student_turn(turn, [9] * framed)
    return turn


def talked(kind: ConversationType = GUIDED, **rules) -> Conversation:
    """A conversation in which both spoke until the dialogue was over."""
    conversation = started(kind, ClassroomRules(**rules))
    while conversation.state in (State.TEACHER_TURN, State.STUDENT_TURN):
        teacher_says(conversation) if conversation.state is State.TEACHER_TURN else student_says(conversation)
    return conversation


# Lengths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_turns", "kind", "messages"),
    [(15, GUIDED, 15), (15, ATTEMPTED, 16), (1, GUIDED, 1), (1, ATTEMPTED, 2), (4, GUIDED, 5), (4, ATTEMPTED, 4)],
)
def test_max_turns_counts_messages_and_the_teacher_closes(max_turns, kind, messages):
    conversation = talked(kind, max_turns=max_turns)
    roles = [turn.role for turn in conversation.turns]
    first, second = ("teacher", "student") if kind is GUIDED else ("student", "teacher")
    assert roles == [first if i % 2 == 0 else second for i in range(messages)]
    assert roles[-1] == "teacher"


@pytest.mark.parametrize(("framed", "state"), [(4, State.TEACHER_TURN), (5, State.REWARD_TURN), (6, State.REWARD_TURN)])
def test_only_an_exhausted_budget_ends_after_the_student(framed, state):
    # A budget of 10 holds the prompt (3), one sampled token and the framed reply. The teacher needs two more places:
    # a token, and the end token that it may leave out.
    conversation = started(rules=ClassroomRules(max_tokens_in_conversation=10))
    teacher_says(conversation)
    student_says(conversation, framed=framed)
    assert conversation.state is state
    assert conversation.tokens_left == 10 - 3 - 1 - framed


def test_a_teacher_turn_is_limited_by_its_own_limit_and_by_the_budget():
    conversation = started(rules=ClassroomRules(max_tokens_in_conversation=10, max_tokens_per_turn=4))
    assert conversation.teacher_turn_limit == 4
    teacher_says(conversation, tokens=2)
    student_says(conversation, framed=2)
    assert conversation.teacher_turn_limit == 2  # 10 − 3 − 2 − 2 − 1


# Any conversation ---------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    ["Go on.", f"Bye {END_OF_CONVERSATION}", "<think>hm</think>So?", f"<think>{END_OF_CONVERSATION}"]
)
RULES = st.builds(
    ClassroomRules,
    max_turns=st.integers(1, 9),
    max_tokens_in_conversation=st.integers(5, 60),
    max_tokens_per_turn=st.integers(1, 8),
    judge_rules=st.sampled_from([(), ("pedagogical_eval",), ("a", "b"), ("a", "pedagogical_eval")]),
    solutions=st.integers(0, 2),
    ignore_rejected_judge=st.booleans(),
    post_test=st.sampled_from(["", LEDGER]),
)


def draw_verdict(data: st.DataObject, rule: str, attempt: int) -> Verdict:
    outcome = data.draw(st.sampled_from(["good", "bad", "failed"]))
    if outcome == "failed":
        return Verdict(rule, attempt, error="failed")
    if rule == "pedagogical_eval":
        return Verdict(rule, attempt, scores=GOOD if outcome == "good" else BAD)
    return Verdict(rule, attempt, accepted=outcome == "good")


def one_step(conversation: Conversation, data: st.DataObject) -> None:
    if conversation.state is State.TEACHER_TURN:
        if conversation.buffer is None:
            conversation.open_buffer(PROMPT)
        teacher_says(conversation, data.draw(TEXTS), data.draw(st.integers(1, conversation.teacher_turn_limit)))
        conversation.buffer.append_given([5] * data.draw(st.integers(0, 1)))  # an end token that was left out
    elif conversation.state is State.STUDENT_TURN:
        student_says(conversation, data.draw(TEXTS), framed=data.draw(st.integers(1, 12)))
    elif conversation.state is State.JUDGE_TURN:
        rules = conversation.rules.judge_rules
        conversation.add_verdicts([draw_verdict(data, rule, i) for rule in rules for i in range(2)])
    elif conversation.state is State.POST_TEST:
        conversation.add_post_test(PostTest((), ()))
    elif conversation.state is State.GENERATE_SOLUTION:
        conversation.add_solutions([Solution("4", 1.0)] * conversation.rules.solutions)
    else:
        conversation.add_rewards({"length": 0.0})


def assert_refuses_everything_else(conversation: Conversation) -> None:
    """All that does not belong to the present state raises and changes nothing."""
    teacher_turn = State.SUPERVISOR_TURN if conversation.supervised else State.TEACHER_TURN
    review = {State.SUPERVISOR_TURN: lambda c: c.reject_draft(Review())}
    draft = {State.TEACHER_TURN: lambda c: c.add_draft(SampledDraft(Turn("teacher", "")))}
    attempts = {
        State.START: lambda c: c.start(),
        **(draft if conversation.supervised else review),
        teacher_turn: lambda c: c.add_teacher_turn(Turn("teacher", "")),
        State.STUDENT_TURN: lambda c: c.add_student_turn(Turn("student", ""), [1]),
        State.JUDGE_TURN: lambda c: c.add_verdicts([]),
        State.POST_TEST: lambda c: c.add_post_test(PostTest((), ())),
        State.GENERATE_SOLUTION: lambda c: c.add_solutions([Solution("4", 1.0)] * c.rules.solutions),
        State.REWARD_TURN: lambda c: c.add_rewards({}),
    }
    for state, attempt in attempts.items():
        if state is not conversation.state:
            before = copy.deepcopy(vars(conversation) | {"buffer": None})
            with pytest.raises(InvalidTransition, match=str(conversation.state)):
                attempt(conversation)
            assert vars(conversation) | {"buffer": None} == before


@given(rules=RULES, kind=st.sampled_from(ConversationType), data=st.data())
def test_every_conversation_runs_through_the_states_in_order_and_ends(rules, kind, data):
    conversation = new_conversation(kind, rules)
    assert_refuses_everything_else(conversation)
    states = run_to_the_end(conversation, lambda: one_step(conversation, data), 2 * rules.max_turns + 10)
    assert_refuses_everything_else(conversation)
    assert_dialogue_is_well_formed(conversation)
    assert_rest_is_well_formed(conversation, states)
    buffer = conversation.buffer
    if buffer is not None:
        assert len(buffer.completion_ids) == len(buffer.mask) == len(buffer.logprobs)
        sampled = {i for turn in conversation.teacher_turns for i in range(*turn.span)}
        assert [i in sampled for i in range(len(buffer.mask))] == [bit == 1 for bit in buffer.mask]


def run_to_the_end(conversation: Conversation, step: Callable[[], None], most: int) -> list[State]:
    """Start the conversation, and take steps until it ends; returns the states that it passed."""
    conversation.start()
    states = []
    while conversation.state is not State.END:
        assert len(states) < most, "it does not come to an end"
        states.append(conversation.state)
        assert_refuses_everything_else(conversation)
        step()
    return states


def assert_dialogue_is_well_formed(conversation: Conversation) -> None:
    roles = [turn.role for turn in conversation.turns]
    first = 0 if conversation.setup.type is GUIDED else 1
    assert roles == [("teacher", "student")[(i + first) % 2] for i in range(len(roles))]
    goodbyes = [END_OF_CONVERSATION in visible_text(turn.text) for turn in conversation.turns if turn.role == "teacher"]
    exhausted = conversation.teacher_turn_limit < 1
    assert not any(goodbyes[:-1])
    assert len(roles) <= conversation.rules.max_turns + 1
    if roles[-1] == "student":
        assert exhausted
    else:
        assert goodbyes[-1] or exhausted or len(roles) >= conversation.rules.max_turns


def assert_rest_is_well_formed(conversation: Conversation, passed: list[State]) -> None:
    rest = passed[len(conversation.turns) :]
    assert rest == sorted(set(rest), key=ORDER.index), "after the dialogue each state comes once, in order"
    assert passed[: len(conversation.turns)] == [State(f"{turn.role.upper()}_TURN") for turn in conversation.turns]
    assert (State.JUDGE_TURN in rest) == bool(conversation.rules.judge_rules)
    rules = conversation.rules
    valid = {verdict.rule for verdict in conversation.verdicts if verdict.valid}
    rejected = any(verdict.accepted is False for verdict in conversation.verdicts) or (
        conversation.judgement is not None
        and conversation.judgement.scores is not None
        and conversation.judgement.scores.final_reward < 0.3
    )
    judged = valid == set(rules.judge_rules)
    student_counts = judged and (rules.ignore_rejected_judge or not rejected)
    assert (State.POST_TEST in rest) == (bool(rules.post_test) and student_counts)
    assert (State.GENERATE_SOLUTION in rest) == (rules.solutions > 0 and student_counts)
    assert conversation.lacks_verdict is not judged and conversation.rejected == (judged and rejected)


# Supervised -----------------------------------------------------------------------------------------------------------

REVIEWS = st.builds(
    Review,
    valid=st.sampled_from([True, False, False, None]),
    penalty=st.just(-1.0),
    critique=st.sampled_from(["", "No."]),
    correction=st.sampled_from([None, "Yes.", f"Bye {END_OF_CONVERSATION}"]),
)
SUPERVISION = st.builds(
    SupervisionConfig,
    on_invalid=st.sampled_from(ON_INVALID),
    max_retries=st.integers(1, 3),
    show_critique=st.booleans(),
)
END, FRAME, WORD = 2, 9, 8


class Letters:
    """A tokenizer and the teacher that uses it: every sampled token has an id of its own."""

    added_tokens_decoder: dict = {}

    def __init__(self) -> None:
        self.tokenizer = self
        self.frame = SimpleNamespace(turn_end_id=END, reply=lambda text: [FRAME] * (2 + len(text) // 10))
        self.pieces: dict[int, str] = {}

    def __len__(self) -> int:
        return 1000 + len(self.pieces)

    def sample(self, text: str, count: int) -> tuple[int, ...]:
        """New ids for a text: the last stands for its last letter, the first for the rest."""
        first_id = len(self)
        parts = [text] if count == 1 else [text[:-1], *[""] * (count - 2), text[-1:]]
        self.pieces |= {first_id + offset: part for offset, part in enumerate(parts)}
        return tuple(range(first_id, first_id + count))

    def encode(self, text: str, **_: bool) -> list[int]:
        return [WORD] * (len(text) // 3 + 1)

    def decode(self, ids, **_: bool) -> str:
        return "".join(self.pieces.get(token, "") for token in ids)


def supervised_step(conversation: Conversation, turn: SupervisedTurn, teacher: Letters, data: st.DataObject) -> None:
    """What `Classroom` does in the two states of a supervised teacher."""
    if conversation.state is State.TEACHER_TURN:
        if conversation.buffer is None:
            conversation.open_buffer(PROMPT)
        hint = turn.hint_ids(conversation)
        count = data.draw(st.integers(1, conversation.turn_limit_after(len(hint))))
        text, given = data.draw(TEXTS), data.draw(st.sampled_from([(), (END,)]))
        message = Turn("teacher", text, tokens=count, policy=PolicyVersion())
        conversation.add_draft(SampledDraft(message, teacher.sample(text, count), (-0.5,) * count, given, hint))
        return
    review = data.draw(REVIEWS)
    reviewed = turn.settle(conversation, review)
    if reviewed is None:
        conversation.reject_draft(review)
        return
    start = len(conversation.buffer.completion_ids)
    span = (start, start + len(reviewed.logprobs)) if reviewed.in_context else None
    conversation.buffer.branches += reviewed.branches
    add_tokens(conversation.buffer, reviewed.ids, reviewed.logprobs)
    conversation.add_teacher_turn(replace(reviewed.turn, span=span))


@given(rules=RULES, kind=st.sampled_from(ConversationType), supervision=SUPERVISION, data=st.data())
def test_a_supervised_conversation_ends_and_trains_on_each_sampled_token_once(rules, kind, supervision, data):
    conversation, teacher = new_conversation(kind, rules), Letters()
    conversation.supervised = True
    turn = SupervisedTurn(supervision, SimpleNamespace(teacher=teacher), forced_ids=(4,))

    def step() -> None:
        if conversation.state in (State.TEACHER_TURN, State.SUPERVISOR_TURN):
            supervised_step(conversation, turn, teacher, data)
            assert conversation.tokens_left >= 0, "the context is longer than allowed"
        else:
            one_step(conversation, data)

    most = (2 * supervision.max_retries + 3) * (rules.max_turns + 10)
    states = run_to_the_end(conversation, step, most)
    assert_dialogue_is_well_formed(conversation)
    unsupervised = [State.TEACHER_TURN if state is State.SUPERVISOR_TURN else state for state in states]
    assert_rest_is_well_formed(conversation, [state for state, _ in groupby(unsupervised)])
    for message in conversation.teacher_turns:
        assert len(message.drafts) <= (1 if message.replaced else supervision.max_retries)
        assert all(draft.review.valid is False for draft in message.drafts)
    if conversation.buffer is not None:
        assert_each_sampled_token_is_in_one_row(conversation, teacher)


def assert_each_sampled_token_is_in_one_row(conversation: Conversation, teacher: Letters) -> None:
    buffer, limit = conversation.buffer, conversation.rules.max_tokens_in_conversation
    assert len(buffer.completion_ids) == len(buffer.mask) == len(buffer.logprobs)
    names = ("prompt_ids", "completion_ids", "mask", "logprobs", "branches")
    fields = dict.fromkeys(("id", "request_id", "problem_id", "problem", "answer"), "") | {"step": 0, "index": 0}
    tokens = {name: getattr(buffer, name) for name in names}
    scored = {"rewards": {}, "reward": None, "meta": {}, "turns": conversation.turns}
    policy_row, *aux = rows_of(Trajectory(**fields, **scored, **tokens))
    trained = Counter()
    for row in (policy_row, *aux):
        columns = (row.completion_ids, row.mask, row.target, row.logprobs, row.messages)
        assert len({len(column) for column in columns}) == 1
        trained += Counter(token for token, bit in zip(row.completion_ids, row.mask, strict=True) if bit)
        for bit, target, logprob, message in zip(*columns[1:], strict=True):
            assert (logprob == -0.5) == (bit == 1) == (message >= 0) and not (bit and target)
    assert trained == Counter(list(teacher.pieces)), "each once: in the conversation, or in one row beside it"
    assert all(len(row.prompt_ids) + len(row.completion_ids) <= limit for row in aux)


# What it refuses besides --------------------------------------------------------------------------------------------


def test_the_context_is_opened_once_and_on_the_teachers_turn():
    conversation = started(ATTEMPTED)
    with pytest.raises(InvalidTransition):
        conversation.open_buffer(PROMPT)
    student_says(conversation)
    conversation.open_buffer(PROMPT)
    with pytest.raises(InvalidTransition, match="open already"):
        conversation.open_buffer(PROMPT)


@pytest.mark.parametrize(
    ("conversation", "attempt", "message"),
    [
        (started(), lambda c: c.add_draft(SampledDraft(Turn("teacher", ""))), "without a supervisor"),
        (started(), lambda c: c.add_teacher_turn(Turn("student", "I am the teacher now.")), "turn of the student"),
        (started(ATTEMPTED), lambda c: c.add_student_turn(Turn("teacher", "")), "turn of the teacher"),
        (started(ATTEMPTED), lambda c: c.next_persona, "opening attempt"),
        (talked(solutions=2), lambda c: c.add_solutions([Solution("4", 1.0)]), "1 solutions came, 2 were due"),
    ],
    ids=["draft", "teacher", "student", "persona", "solutions"],
)
def test_what_does_not_fit_is_refused(conversation, attempt, message):
    with pytest.raises(InvalidTransition, match=message):
        attempt(conversation)


# What others see of it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(ConversationType))
def test_personas_come_in_the_order_drawn_and_the_opening_attempt_has_none(kind):
    conversation = talked(kind, max_turns=7)
    personas = [turn.persona for turn in conversation.turns if turn.role == "student"]
    assert personas == ([] if kind is GUIDED else [None]) + ["persona 0", "persona 1", "persona 2"]


def test_the_judge_sees_roles_and_visible_text():
    conversation = started(rules=ClassroomRules(max_turns=3))
    teacher_says(conversation, "<think>He is wrong.</think>Are you sure?")
    student_says(conversation, "No.")
    assert conversation.transcript() == [
        {"role": "teacher", "content": "Are you sure?"},
        {"role": "student", "content": "No."},
    ]
