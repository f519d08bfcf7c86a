"""Requests for batches: what is refused, which ask for the same work, and the problems in them."""

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.problem import PostTestMaterial, Step
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.trajectory import Trajectory

MATERIAL = PostTestMaterial((Step("the sum", "3"),))


def request(**changes: Any) -> SampleRequest:
    return SampleRequest(**{"problems": ["p"], "answers": ["a"], "request_id": "r", "seed": 1, "step": 0} | changes)


def nested(levels: int) -> dict[str, Any]:
    return {"inner": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answers": []}, "must have one entry per conversation each"),
        ({"meta": [{}, {}]}, "problems, answers, meta must have one entry"),
        ({"post_test_material": []}, "post_test_material must have one entry"),
        ({"problems": [], "answers": []}, "at least 1 item"),
        ({"meta": [nested(21)]}, "entry 0 holds values within values on more than 20 levels"),
        ({"run_id": "run"}, "give both, or neither"),
        ({"policy_version": 3}, "give both, or neither"),
        ({"request_id": "../r"}, "should match pattern"),
        ({"greed": True}, "Extra inputs"),
    ],
)
def test_a_malformed_request_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        request(**changes)


def test_meta_may_nest_20_levels() -> None:
    assert request(meta=[nested(20)]).meta


def test_a_request_names_a_policy_or_none() -> None:
    assert request().wanted_policy is None
    assert request(run_id="run", policy_version=3).wanted_policy == PolicyVersion("run", 3)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"judge_again": True}, True),
        ({"supervised": False, "post_test_material": None}, True),
        ({"supervised": True}, False),
        ({"post_test_material": [MATERIAL]}, False),
        ({"seed": 2}, False),
        ({"greedy": True}, False),
    ],
)
def test_a_digest_tells_whether_two_requests_ask_for_the_same_work(changes: dict, same: bool) -> None:
    assert (request(**changes).digest == request().digest) == same


def test_conversations_on_one_problem_share_it_and_the_first_material() -> None:
    materials = [MATERIAL, PostTestMaterial(), PostTestMaterial()]
    first, second, third = request(
        problems=["p", "p", "q"], answers=["a"] * 3, post_test_material=materials
    ).all_problems()
    assert first is second and first.material == MATERIAL
    assert (third.text, third.material) == ("q", PostTestMaterial())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_response_is_written_piece_by_piece_as_in_one_piece(count: int) -> None:
    fields = {"request_id": "r", "step": 0, "problem_id": "", "problem": '"conversations":[]', "answer": "", "meta": {}}
    tokens = {"prompt_ids": [1], "completion_ids": [2], "mask": [1], "logprobs": [-0.5]}
    records = [Trajectory(id=f"{n}", index=n, rewards={}, reward=None, **fields, **tokens) for n in range(count)]
    response = SampleResponse(request_id="r", policy=PolicyVersion(), conversations=records, reward_weights={})
    assert asyncio.run(response.as_json()) == response.model_dump_json().encode()
