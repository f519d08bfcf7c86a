"""Turn credit on numbers worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.tokens import AuxSample, Turn
from classroom_rl.trainer.batch_builder import _conversation_rows
from classroom_rl.trainer.turn_advantages import ProcessRewards, credits_of, group_credits, process_rewards, shuffled
from tests.support.offline_trainer import PROBLEMS, conversation

MODES = ("immediate", "to_go", "progress")


def of(*values: float | None) -> ProcessRewards:
    return ProcessRewards(list(values), [])


def test_each_mode_by_hand() -> None:
    """r = 0, −1, 0.5. To go with γ = 0.5: (0 − 0.5 + 0.125) / 1.75, (−1 + 0.25) / 1.5, 0.5. Means so far: 0, −0.5,
    −1/6."""
    values = [0.0, -1.0, 0.5]
    assert credits_of(values, "immediate", 0.5) == values
    assert credits_of(values, "to_go", 0.5) == pytest.approx([-0.375 / 1.75, -0.75 / 1.5, 0.5])
    assert credits_of(values, "progress", 0.5) == pytest.approx([0.0, -0.5, 1 / 3])
    with pytest.raises(ValueError, match="no turn credit 'both'"):
        credits_of(values, "both", 0.5)


def test_a_message_without_a_verdict_gets_nothing_and_gives_nothing() -> None:
    values = [0.0, None, -1.0]
    assert credits_of(values, "to_go", 0.5) == pytest.approx([-0.25 / 1.25, None, -1.0])
    assert credits_of(values, "progress", 0.5) == pytest.approx([0.0, None, -0.5])
    one, other = group_credits([of(0.0, None), of(-1.0, -1.0)], [0, 0], "immediate", 1.0, 0.3)
    assert one.messages == pytest.approx([0.15, 0.0]) and other.messages == pytest.approx([-0.15, 0.0])


def test_a_good_and_a_bad_turn_of_one_conversation_get_opposite_signs() -> None:
    """At the first message, the group's mean is −0.5; at the second it is −0.25."""
    group = [of(0.0, -1.0), of(-1.0, 0.0), of(-1.0, 0.0), of(0.0, 0.0)]
    first, second, *_ = group_credits(group, [0] * 4, "immediate", 0.9, 0.5)
    assert first.messages == pytest.approx([0.25, -0.375])
    assert second.messages == pytest.approx([-0.25, 0.125])


def test_groups_do_not_see_each_other() -> None:
    found = group_credits([of(0.0), of(-1.0), of(-3.0), of(-3.0)], [0, 0, 1, 1], "immediate", 0.9, 1.0)
    assert [each.messages[0] for each in found] == pytest.approx([0.5, -0.5, 0.0, 0.0])


def test_a_rejected_draft_counts_in_the_mean_and_a_replaced_message_does_not() -> None:
    """The first conversation's second message was written twice: −2, then 0. The second's was replaced after −1. The
    mean at the second message: (0 − 2 − 1) / 3."""
    one = ProcessRewards([0.0, 0.0], [(1, -2.0)])
    other = ProcessRewards([0.0, -1.0], [(1, -1.0)], frozenset({1}))
    first, second = group_credits([one, other], [0, 0], "immediate", 0.9, 1.0)
    assert first.messages == pytest.approx([0.0, 1.0]) and first.beside == pytest.approx([-1.0])
    assert second.messages == pytest.approx([0.0, 0.0]) and second.beside == pytest.approx([0.0])


def test_turn_rewards_are_weighed_and_summed() -> None:
    turns = {"supervisor": [0.0, -1.0, None], "judge": [1.0, 0.5, None]}
    record = conversation(0, PROBLEMS[0], seed=3, turn_rewards=turns)
    rewards = process_rewards(record, rows_of(record), {"supervisor": 2.0, "judge": 1.0})
    assert rewards.messages == [1.0, -1.5, None] and rewards.mean == -0.25
    assert process_rewards(record, rows_of(record), {"judge": 1.0}).mean == 0.75


def test_a_draft_has_its_own_penalty() -> None:
    branch = AuxSample("draft", 2, 9, (7, 8), (-1.0, -1.0), reward=-2.0, draft=0)
    record = conversation(0, PROBLEMS[0], seed=3, branches=[branch], turn_rewards={"supervisor": [0.0, 0.0, 0.0]})
    assert process_rewards(record, rows_of(record), {"supervisor": 0.5}).beside == [(1, -1.0)]
    row = rows_of(record)[1]
    assert (row.kind, row.message, row.prompt_ids) == ("draft", 1, record.prompt_ids)
    assert row.completion_ids == [*record.completion_ids[:9], 7, 8]
    assert (row.mask, row.messages) == ([0] * 9 + [1, 1], [-1] * 9 + [1, 1])


def test_a_message_written_with_its_critique_counts_once() -> None:
    """Its row beside the conversation has the credit of the message, and no reward of its own in the mean: A's draft
    −2 and message 0, B's message −1, mean −1."""
    branches = [
        AuxSample("draft", 0, 0, (7,), (-1.0,), reward=-2.0, draft=0),
        AuxSample("policy", 0, 0, (8,), (-1.0,), (9,), 0.0),
    ]
    record = conversation(0, PROBLEMS[0], seed=3, branches=branches, turn_rewards={"supervisor": [0.0, None, None]})
    other = conversation(1, PROBLEMS[0], seed=3, turn_rewards={"supervisor": [-1.0, None, None]})
    rewards = [process_rewards(each, rows_of(each), {"supervisor": 1.0}) for each in (record, other)]
    a, b = group_credits(rewards, [0, 0], "immediate", 0.9, 1.0)
    assert (a.messages[0], a.beside, b.messages[0]) == (1.0, [-1.0], 0.0)
    planned = _conversation_rows(rows_of(record), a, set(), learns_drafts=True)
    assert [(each.row.kind, each.credit) for each in planned.beside] == [("draft", -1.0), ("policy", 1.0)]


def test_a_replaced_message_has_no_tokens_of_the_policy() -> None:
    record = conversation(0, PROBLEMS[0], seed=3, turn_rewards={"supervisor": [0.0, -1.0, 0.0]})
    turns = list(record.turns)
    start, end = turns[2].span
    turns[2] = Turn("teacher", "right", policy=turns[2].policy, review=Review(False, "leak", -1.0), replaced=True)
    mask = [0 if start <= place < end else value for place, value in enumerate(record.mask)]
    record = record.model_copy(update={"turns": turns, "mask": mask})
    assert set(rows_of(record)[0].messages[start:end]) == {-1}
    assert process_rewards(record, rows_of(record), {"supervisor": 1.0}).replaced == {1}


values = st.lists(st.none() | st.floats(-3, 1), min_size=1, max_size=8)


@given(values)
def test_progress_adds_up_to_the_process_reward(known: list[float | None]) -> None:
    paid = [value for value in credits_of(known, "progress", 0.9) if value is not None]
    mean = of(*known).mean
    assert mean is None and not paid or sum(paid) == pytest.approx(mean, abs=1e-9)


@given(st.lists(values, min_size=4, max_size=4), st.sampled_from(MODES))
def test_credits_of_a_group_cancel_out_at_each_message(group: list[list[float | None]], mode: str) -> None:
    found = group_credits([of(*each) for each in group], [0] * 4, mode, 0.9, 0.3)
    for number in range(max(map(len, group))):
        at = [each.messages[number] for each in found if number < len(each.messages)]
        assert sum(at) == pytest.approx(0.0, abs=1e-9)


@given(values, st.sampled_from(MODES))
def test_equal_messages_earn_a_group_nothing(known: list[float | None], mode: str) -> None:
    for each in group_credits([of(*known)] * 3, [0] * 3, mode, 0.9, 0.3):
        assert each.messages == pytest.approx([0.0] * len(known), abs=1e-9)


@given(st.lists(values, min_size=2, max_size=6), st.integers(0, 99))
def test_shuffling_keeps_the_values_and_the_gaps(batch: list[list[float | None]], seed: int) -> None:
    before = [ProcessRewards(list(each), [(0, -7.0)]) for each in batch]
    after = shuffled(before, seed)
    flat = [value for each in after for value in [*each.messages, *(b for _, b in each.beside)]]
    assert [value is None for value in flat[: len(batch[0])]] == [value is None for value in batch[0]]
    known = sorted(value for value in flat if value is not None)
    wanted = [value for each in before for value in [*each.messages, *(b for _, b in each.beside)] if value is not None]
    assert known == sorted(wanted)
