"""The state machine of a supervised conversation under random reviews: it ends, and trains on each sampled token
once."""

from collections import Counter
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import SupervisionConfig
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.conversation import Conversation, State
from classroom_rl.environments.classroom.setup import ConversationType
from classroom_rl.environments.classroom.supervised_turn import SupervisedTurn
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.supervision import ON_INVALID, SampledDraft
from classroom_rl.rollout.tokens import Turn, add_tokens
from classroom_rl.rollout.trajectory import Trajectory
from tests.environments.classroom.test_conversation import (
    PROMPT,
    RULES,
    TEXTS,
    assert_dialogue_is_well_formed,
    assert_refuses_everything_else,
    assert_rest_is_well_formed,
    new_conversation,
    one_step,
)

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
    max_retries=st.integers(0, 3),
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
        first = len(self)
        parts = [text] if count == 1 else [text[:-1], *[""] * (count - 2), text[-1:]]
        self.pieces |= {first + place: part for place, part in enumerate(parts)}
        return tuple(range(first, first + count))

    def encode(self, text: str, **_: bool) -> list[int]:
        return [WORD] * (len(text) // 3 + 1)

    def decode(self, ids, **_: bool) -> str:
        return "".join(self.pieces.get(each, "") for each in ids)


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
    entered = turn.settle(conversation, review)
    if entered is None:
        conversation.reject_draft(review)
        return
    start = len(conversation.buffer.completion_ids)
    span = (start, start + len(entered.logprobs)) if entered.in_context else None
    conversation.buffer.branches += entered.branches
    add_tokens(conversation.buffer, entered.ids, entered.logprobs)
    conversation.add_teacher_turn(replace(entered.turn, span=span))


@given(rules=RULES, kind=st.sampled_from(ConversationType), supervision=SUPERVISION, data=st.data())
def test_a_supervised_conversation_ends_and_trains_on_each_sampled_token_once(rules, kind, supervision, data):
    conversation, teacher = new_conversation(kind, rules), Letters()
    conversation.supervised = True
    turn = SupervisedTurn(supervision, SimpleNamespace(teacher=teacher), forced_ids=(4,))
    conversation.start()
    passed = []
    while conversation.state is not State.END:
        assert len(passed) < (2 * supervision.max_retries + 3) * (rules.max_turns + 10), "it does not come to an end"
        passed.append(conversation.state)
        assert_refuses_everything_else(conversation)
        if conversation.state in (State.TEACHER_TURN, State.SUPERVISOR_TURN):
            supervised_step(conversation, turn, teacher, data)
            assert conversation.tokens_left >= 0, "the context is longer than allowed"
        else:
            one_step(conversation, data)
    assert_dialogue_is_well_formed(conversation)
    spoken = [State.TEACHER_TURN if state is State.SUPERVISOR_TURN else state for state in passed]
    assert_rest_is_well_formed(conversation, [state for state, _ in groupby(spoken)])
    for each in conversation.teacher_turns:
        assert len(each.drafts) <= (1 if each.replaced else supervision.max_retries)
        assert all(draft.review.valid is False for draft in each.drafts)
    if conversation.buffer is not None:
        assert_each_sampled_token_is_in_one_row(conversation, teacher)


def assert_each_sampled_token_is_in_one_row(conversation: Conversation, teacher: Letters) -> None:
    buffer, limit = conversation.buffer, conversation.rules.max_tokens_in_conversation
    assert len(buffer.completion_ids) == len(buffer.mask) == len(buffer.logprobs)
    names = ("prompt_ids", "completion_ids", "mask", "logprobs", "branches")
    about = dict.fromkeys(("id", "request_id", "problem_id", "problem", "answer"), "") | {"step": 0, "index": 0}
    tokens = {name: getattr(buffer, name) for name in names}
    scored = {"rewards": {}, "reward": None, "meta": {}, "turns": conversation.turns}
    whole, *beside = rows_of(Trajectory(**about, **scored, **tokens))
    trained = Counter()
    for row in (whole, *beside):
        columns = (row.completion_ids, row.mask, row.target, row.logprobs, row.messages)
        assert len({len(column) for column in columns}) == 1
        trained += Counter(each for each, bit in zip(row.completion_ids, row.mask, strict=True) if bit)
        for bit, target, logprob, message in zip(*columns[1:], strict=True):
            assert (logprob == -0.5) == (bit == 1) == (message >= 0) and not (bit and target)
    assert trained == Counter(list(teacher.pieces)), "each once: in the conversation, or in one row beside it"
    assert all(len(row.prompt_ids) + len(row.completion_ids) <= limit for row in beside)
