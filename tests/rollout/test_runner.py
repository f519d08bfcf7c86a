"""Batches of episodes: the event loop stays free, and the prompt of a group is encoded once."""

import asyncio
import json

import pytest

from classroom_rl.rollout.policy_turn import PolicyModel
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import play_all, weighted_sum
from classroom_rl.rollout.scheduler import YieldGate
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
        encoded = await batch
        assert json.loads(encoded) == json.loads((await service.sample(request)).model_dump_json())
        assert encoded == (await service.sample(request)).model_dump_json().encode()

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


def test_the_first_error_is_raised_with_its_cause_and_the_other_episodes_are_cancelled(caplog):
    first, cancelled = ValueError("first"), []
    first.__cause__ = KeyError("why")

    async def play(number: int) -> None:
        if number == 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise
        raise first if number == 0 else OSError(f"error {number}")

    plays = [0, 1, 2]
    with pytest.raises(ValueError, match="first") as raised:
        run(play_all(plays, play, YieldGate()))
    assert raised.value is first and isinstance(first.__cause__, KeyError) and plays == [None] * 3
    assert cancelled == [2] and "another episode failed, too: error 1" in caplog.text
