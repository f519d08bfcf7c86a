"""Tokens enter the teacher's context through one class, each with its mask and its log-prob."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.tokens import TokenBuffer

IDS = st.lists(st.integers(0, 1000), max_size=5)
PIECES = st.lists(st.tuples(st.booleans(), IDS), max_size=10)


def test_sampled_tokens_are_masked_in_and_given_ones_are_not():
    buffer = TokenBuffer([1, 2])
    assert buffer.append_sampled([10, 11], [-0.25, -1.5]) == (0, 2)
    buffer.append_given([90, 91, 92])
    assert buffer.append_sampled([12], [-3.0]) == (5, 6)
    assert buffer.prompt_ids == [1, 2]
    assert buffer.completion_ids == [10, 11, 90, 91, 92, 12]
    assert buffer.mask == [1, 1, 0, 0, 0, 1]
    assert buffer.logprobs == [-0.25, -1.5, 0.0, 0.0, 0.0, -3.0]
    assert buffer.ids == [1, 2, 10, 11, 90, 91, 92, 12]
    assert len(buffer) == 8


@pytest.mark.parametrize(("ids", "logprobs"), [([1, 2], [-0.1]), ([1], [-0.1, -0.2]), ([], [-0.1]), ([1], [])])
def test_unequal_lengths_are_refused_and_leave_the_buffer_alone(ids, logprobs):
    buffer = TokenBuffer([1])
    with pytest.raises(ValueError, match=f"{len(ids)} sampled tokens came with {len(logprobs)} log-probs"):
        buffer.append_sampled(ids, logprobs)
    assert (buffer.completion_ids, buffer.mask, buffer.logprobs) == ([], [], [])


@given(prompt=IDS, pieces=PIECES)
def test_ids_mask_and_logprobs_stay_the_same_length_whatever_is_appended(prompt, pieces):
    buffer = TokenBuffer(prompt)
    wanted_ids, wanted_mask = [], []
    for sampled, ids in pieces:
        if sampled:
            start, end = buffer.append_sampled(ids, [-float(i + 1) for i in ids])
            assert buffer.completion_ids[start:end] == ids
        else:
            buffer.append_given(ids)
        wanted_ids += ids
        wanted_mask += [int(sampled)] * len(ids)
    assert buffer.ids == prompt + wanted_ids
    assert buffer.mask == wanted_mask
    assert buffer.logprobs == [-float(i + 1) * m for i, m in zip(wanted_ids, wanted_mask, strict=True)]
    assert len(buffer) == len(prompt) + len(wanted_ids)


def test_the_buffer_keeps_no_hold_of_the_lists_it_was_given():
    prompt, ids = [1], [2]
    buffer = TokenBuffer(prompt)
    buffer.append_given(ids)
    prompt.append(9)
    ids.append(9)
    assert buffer.ids == [1, 2]


def test_policy_versions_name_their_run():
    assert str(PolicyVersion()) == "initial weights v0"
    assert str(PolicyVersion("run-a", 3)) == "run-a v3"
