"""Batches of episodes: the event loop stays free, and the prompt of a group is encoded once."""

import asyncio
import json

import pytest

from classroom_rl.rollout.policy_turn import PolicyModel
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import weighted_sum
from tests.support.scripted_engine import ScriptedEngine
from tests.support.turned_clock import run


def test_the_prompt_of_a_group_is_encoded_once(room, generation, monkeypatch):
    encoded, encode_chat = [], PolicyModel.encode_chat
    monkeypatch.setattr(PolicyModel, "encode_chat", lambda *given: encoded.append(1) or encode_chat(*given))
    service = room.open(generation)
    request = SampleRequest(problems=["a"] * 8 + ["b"] * 8, answers=[""] * 16, request_id="r", seed=1, step=0)
    records = run(service.sample(request)).conversations
    assert len(encoded) == 2
    assert len({tuple(record.prompt_ids) for record in records}) == 2


def test_a_batch_lets_others_go_on_between_its_conversations(room, generation):
    """An answer to a request that comes meanwhile waits for a few conversations, and not for all of them."""
    sampled, between = 0, []

    def say(_: str) -> str:
        nonlocal sampled
        sampled += 1
        return "Say hello."

    async def play() -> None:
        nonlocal sampled
        room.teacher = ScriptedEngine(room.tokenizer, say)
        request = SampleRequest(problems=["a"] * 300, answers=[""] * 300, request_id="r", seed=1, step=0)
        service = room.open(generation)
        batch = asyncio.create_task(service.sample_as_json(request))
        while not batch.done():
            sampled = 0
            await asyncio.sleep(0)
            between.append(sampled)
        whole = await batch
        assert json.loads(whole) == json.loads((await service.sample(request)).model_dump_json())
        assert whole == (await service.sample(request)).model_dump_json().encode()

    run(play())
    assert sum(between) == 900 and max(between) <= 16


@pytest.mark.parametrize(
    ("rewards", "weights", "reward"),
    [
        ({"right": 1.0, "brief": 0.5}, {"right": 1.0, "brief": 0.5}, 1.25),
        ({"right": 1.0, "brief": None}, {"right": 2.0}, 2.0),
        ({"right": 1.0, "brief": None}, {"right": 1.0, "brief": 0.5}, None),
    ],
)
def test_an_episode_is_worth_its_weighted_rewards_if_all_of_them_could_be_scored(rewards, weights, reward):
    assert weighted_sum(rewards, weights) == reward
