"""The simulation of steps, on small cases worked out by hand, and by what must hold of all."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import (
    CONCURRENT,
    LOCKSTEP,
    PHASED,
    Batch,
    Conversation,
    EngineRates,
    Message,
    Rates,
    draw,
    play,
    read_rates,
    simulate,
    simulate_in_turns,
    steps,
)

ENGINE = EngineRates({1: 10.0, 2: 16.0, 4: 24.0}, prefill=100.0, slots=4)
RATES = Rates(ENGINE, ENGINE, 50.0, [1.0], 4.0, 2.0, 4, 3, [10], [20], {"teacher": 50, "student": 40}, 1, {})


def lesson(*messages: tuple[int, int], judge_s: float = 0.0) -> Conversation:
    """A conversation of messages in turns, each with the tokens to read and to sample."""
    roles = ("teacher", "student")
    built_messages = tuple(Message(roles[index % 2], *message) for index, message in enumerate(messages))
    return Conversation(built_messages, sum(map(sum, messages)), judge_s)


def test_tokens_per_second_between_what_was_measured():
    assert [ENGINE.together(n) for n in (1, 2, 3, 4, 8)] == pytest.approx([10, 16, 20, 24, 24])


@pytest.mark.parametrize("schedule", [CONCURRENT, PHASED, LOCKSTEP])
def test_one_conversation(schedule):
    """Teacher: 10 passes of 0.1 s, the first of which reads 50 tokens in 0.5 s. Student: 20 passes, 0.6 s of reading.
    Teacher again: 10 passes, 0.2 s of reading. Judge: 3 s."""
    batch = play(RATES, [lesson((50, 10), (60, 20), (20, 10), judge_s=3)], 1, schedule)
    assert (batch.sampled, batch.judged, batch.busy) == pytest.approx((5.3, 8.3, 5.3))


def test_a_message_costs_its_engine_the_server_and_the_way():
    """Three messages: 0.2 s each on the engine, 0.3 s in the server and 0.4 s on the way, beside the 5.3 s above."""
    engine = replace(ENGINE, message_s=0.2, latency_s=0.4)
    rates = replace(RATES, teacher=engine, student=engine, server_s=0.3)
    batch = play(rates, [lesson((50, 10), (60, 20), (20, 10))], 1)
    assert (batch.sampled, batch.busy) == pytest.approx((8.0, 5.9))


def test_the_server_does_one_thing_after_the_other():
    """The second message leaves the server after 2 s; both engines' first passes are alone."""
    batch = play(replace(RATES, server_s=1), [lesson((0, 1)), lesson((0, 1))], 1)
    assert batch.sampled == pytest.approx(2.1)


def test_two_share_the_passes_of_an_engine():
    """The first begins alone: a pass of 0.1 s with 0.5 s of reading. The second is read in the next pass: 0.5 s and
    2/16 s. Eight further passes of 2/16 s end the first, one more of 0.1 s the second."""
    batch = play(RATES, [lesson((50, 10)), lesson((50, 10), judge_s=1)], 1)
    assert (batch.sampled, batch.judged) == pytest.approx((0.6 + 0.625 + 1 + 0.1, 3.325))


def test_a_pass_reads_no_more_than_it_has_room_for():
    """The first begins alone: 0.6 s and 0.1 s. The two others together are too much for a pass: the second is read in
    one of 0.6 + 0.1 s and is done, and then the third. A message that is too long by itself is read alone."""
    narrow = replace(RATES, teacher=replace(ENGINE, pass_tokens=100))
    assert play(narrow, [lesson((60, 1))] * 3, 1).sampled == pytest.approx(2.1)
    assert play(RATES, [lesson((60, 1))] * 3, 1).sampled == pytest.approx(0.7 + 1.2 + 2 / 16)
    assert play(narrow, [lesson((300, 1))], 1).sampled == pytest.approx(3.1)


def test_two_servers_halve_what_one_does_when_its_slots_are_full():
    one_slot = replace(ENGINE, slots=1)
    rates = replace(RATES, teacher=one_slot, student=one_slot)
    conversations = [lesson((0, 10))] * 8
    assert play(rates, conversations, 1).sampled == pytest.approx(8)
    assert play(rates, conversations, 2).sampled == pytest.approx(4)


def test_the_judge_reads_while_others_are_sampled_but_not_in_phases():
    """The short one ends after a pass alone and nine of 2/16 s, at 1.225 s; the long one has eleven tokens left. The
    judge takes 5 s for the short one."""
    conversations = [lesson((0, 10), judge_s=5), lesson((0, 20), judge_s=1)]
    assert play(RATES, conversations, 1).judged == pytest.approx(6.225)
    assert play(RATES, conversations, 1, PHASED).judged == pytest.approx(2.325 + 5)


def test_in_lockstep_nobody_answers_before_all_have_spoken():
    """One teacher's message is done after 0.1 s, the other's after eleven further passes, at 1.2 s. In phases the first
    student answers meanwhile. In lockstep both are asked at 1.2 s, and the second waits for the first one's pass."""
    conversations = [lesson((0, 1), (0, 5)), lesson((0, 11), (0, 1))]
    assert play(RATES, conversations, 1, PHASED).sampled == pytest.approx(1.3)
    assert play(RATES, conversations, 1, LOCKSTEP).sampled == pytest.approx(1.2 + 0.1 + 0.125 + 3 * 0.1)


def test_a_drawn_conversation_has_each_token_read_once_by_each_engine():
    conversation = draw(RATES, Random(1))
    assert conversation.messages == (Message("teacher", 50, 10), Message("student", 50, 20), Message("teacher", 20, 10))
    assert conversation.tokens == 90 and conversation.judge_s == 1.0


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


messages = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=5)
batches = st.lists(
    st.builds(lambda said, judge_s: lesson(*said, judge_s=judge_s), messages, st.floats(0, 5)), max_size=8
)


@settings(deadline=None)
@given(batches, st.integers(1, 3), st.sampled_from([CONCURRENT, PHASED, LOCKSTEP]), st.sampled_from([0.0, 0.1]))
def test_no_batch_ends_before_its_longest_conversation_alone(conversations, servers, schedule, more_s):
    engine = replace(ENGINE, message_s=more_s, latency_s=more_s, pass_tokens=60)
    rates = replace(RATES, teacher=engine, student=engine, server_s=more_s)
    batch = play(rates, conversations, servers, schedule)
    alone = [play(rates, [conversation], 1) for conversation in conversations]
    assert batch.sampled >= max((single.sampled for single in alone), default=0) - 1e-6
    assert batch.judged >= max((single.judged for single in alone), default=0) - 1e-6
    assert batch.busy <= 2 * servers * batch.sampled + 1e-6


@given(st.lists(st.tuples(*[st.floats(0.1, 9)] * 3), min_size=2, max_size=8), st.floats(0, 3))
def test_overlapping_never_takes_longer(parts, publish):
    played = [Batch(sampled, sampled + judge, sampled) for sampled, judge, _ in parts]
    train = [part[2] for part in parts]
    assert steps(played, train, publish, 1)[-1] <= steps(played, train, publish, 0)[-1] + 1e-9


def test_more_gpus_are_never_slower_with_the_shipped_rates():
    rates = read_rates(Path(__file__).parents[2] / "benchmarks/rates_7b_assumed.yaml")
    seconds = [simulate(rates, servers, 2 * servers, CONCURRENT, 0).seconds for servers in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("gpus", [4, 8])
def test_engines_on_every_gpu_leave_them_less_idle_than_engines_on_the_first(gpus):
    rates = read_rates(Path("benchmarks/rates_7b_assumed.yaml"))
    before, idle_before = simulate_in_turns(rates, gpus, copies=1, ranks=4)
    now, idle = simulate_in_turns(rates, gpus, copies=gpus, ranks=gpus)
    assert now.seconds < before.seconds and 0 < idle < idle_before < 1
    # What is trained on takes the same GPU seconds, on however many GPUs.
    assert before.parts["training"] * 4 == pytest.approx(now.parts["training"] * gpus)
