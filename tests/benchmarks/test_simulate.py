"""The simulation of steps, on small cases worked out by hand, and by what must hold of all."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import (
    CONCURRENT,
    PHASED,
    Batch,
    Conversation,
    EngineRates,
    Rates,
    play,
    read_rates,
    simulate,
    steps,
)

ENGINE = EngineRates({1: 10.0, 2: 16.0, 4: 24.0}, prefill=100.0, slots=4)
RATES = Rates(ENGINE, ENGINE, 50.0, [1.0], 4.0, 2.0, 4, 3, [10], [20], 50, 1, {})


def test_tokens_per_second_between_what_was_measured():
    assert [ENGINE.per_sequence(n) * n for n in (1, 2, 3, 4, 8)] == pytest.approx([10, 16, 20, 24, 24])


@pytest.mark.parametrize("schedule", [CONCURRENT, PHASED])
def test_one_conversation(schedule):
    """Teacher: 50 tokens read in 0.5 s, 10 sampled in 1 s. Student: its prompt and these 10 in 0.6 s, then 2 s. Teacher
    again: the student's 20 read in 0.2 s, 10 sampled in 1 s. Judge: 3 s."""
    batch = play(RATES, [Conversation(50, (10, 20, 10), 3.0)], 1, schedule)
    assert (batch.sampled, batch.judged, batch.busy) == pytest.approx((5.3, 8.3, 5.3))


def test_two_share_an_engine():
    """The first is read until 0.5 s and then sampled alone at 10 tokens/s until the second is read, at 1 s: 5 of its
    10 tokens. Then both get 8 tokens/s: the first ends 5/8 s later, at 1.625, the second has 5 left and ends at 2.125.
    """
    batch = play(RATES, [Conversation(50, (10,), 0.0), Conversation(50, (10,), 1.0)], 1)
    assert (batch.sampled, batch.judged) == pytest.approx((2.125, 3.125))


def test_sampling_can_stand_still_while_a_message_is_read():
    """The first is read until 0.5 s and then waits until the second is read, at 1 s. Both get 8 tokens/s until both
    have 10, 1.25 s later."""
    held_up = replace(RATES, teacher=replace(ENGINE, reading_holds_up=True))
    batch = play(held_up, [Conversation(50, (10,), 0.0), Conversation(50, (10,), 1.0)], 1)
    assert (batch.sampled, batch.judged) == pytest.approx((2.25, 3.25))


def test_two_servers_halve_what_one_does_when_its_slots_are_full():
    one_slot = replace(ENGINE, slots=1)
    rates = replace(RATES, teacher=one_slot, student=one_slot)
    conversations = [Conversation(0, (10,), 0.0)] * 8
    assert play(rates, conversations, 1).sampled == pytest.approx(8)
    assert play(rates, conversations, 2).sampled == pytest.approx(4)


def test_the_judge_reads_while_others_are_sampled_but_not_in_phases():
    """Both get 8 tokens/s. The short one ends at 1.25 s, and its judge takes 5 s; the long one goes on alone, 10 tokens
    in 1 s."""
    conversations = [Conversation(0, (10,), 5.0), Conversation(0, (20,), 1.0)]
    assert play(RATES, conversations, 1).judged == pytest.approx(6.25)
    assert play(RATES, conversations, 1, PHASED).judged == pytest.approx(7.25)


def test_steps_one_after_the_other():
    assert steps([Batch(4, 6, 4)] * 3, [3] * 3, 1, 0) == [9, 19, 29]


def test_steps_that_overlap():
    """The first batch is sampled from 0 to 4, judged until 6, trained on until 9. The second is sampled from 4 to 8;
    the weights of the first are published from 9 to 10, where the third begins. The second is judged by 10, trained on
    until 13. The third: sampled 14, judged 16; weights published 14 to 15; trained on until 19."""
    assert steps([Batch(4, 6, 4)] * 3, [3] * 3, 1, 1) == [9, 13, 19]


def test_steps_that_overlap_are_as_long_as_their_trainer_if_it_is_slowest():
    ends = steps([Batch(2, 3, 2)] * 6, [10] * 6, 1, 1)
    assert [after - before for before, after in zip(ends[1:], ends[2:], strict=False)] == [11] * 4


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=5)
batches = st.lists(st.builds(Conversation, st.integers(0, 50), lengths.map(tuple), st.floats(0, 5)), max_size=8)


@settings(deadline=None)
@given(batches, st.integers(1, 3), st.sampled_from([CONCURRENT, PHASED]), st.booleans())
def test_no_batch_ends_before_its_longest_conversation_alone(conversations, servers, schedule, holds_up):
    engine = replace(ENGINE, reading_holds_up=holds_up)
    rates = replace(RATES, teacher=engine, student=engine)
    batch = play(rates, conversations, servers, schedule)
    alone = [play(rates, [each], 1) for each in conversations]
    assert batch.sampled >= max((each.sampled for each in alone), default=0) - 1e-6
    assert batch.judged >= max((each.judged for each in alone), default=0) - 1e-6
    assert batch.busy <= 2 * servers * batch.sampled + 1e-6


@given(st.lists(st.tuples(*[st.floats(0.1, 9)] * 3), min_size=2, max_size=8), st.floats(0, 3))
def test_overlapping_never_takes_longer(parts, publish):
    played = [Batch(sampled, sampled + judge, sampled) for sampled, judge, _ in parts]
    train = [each[2] for each in parts]
    assert steps(played, train, publish, 1)[-1] <= steps(played, train, publish, 0)[-1] + 1e-9


def test_more_gpus_are_never_slower_with_the_shipped_rates():
    rates = read_rates(Path(__file__).parents[2] / "benchmarks/rates_7b_assumed.yaml")
    found = [simulate(rates, servers, 2 * servers, CONCURRENT, 0).seconds for servers in (1, 2, 4, 8)]
    assert found == sorted(found, reverse=True)
