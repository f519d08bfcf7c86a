"""One message of the policy: how it is sampled, what of it enters an episode, and that a replay gives the same."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.errors import PolicyMismatch
from classroom_rl.rollout.dialogue import DialogueEpisode
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.environment import Play
from classroom_rl.rollout.policy_turn import PolicyModel, add_policy_message, replay_event, sample_draft
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.supervision import SampledDraft, unreviewed
from classroom_rl.rollout.tokens import TokenBuffer
from classroom_rl.rollout.tools.calculator import calculator
from classroom_rl.rollout.tools.tool import Toolbox
from tests.support.scripted_engine import ScriptedEngine

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
REQUEST = SampleRequest(problems=["a"], answers=["b"], request_id="r", seed=1, step=0)


def play_of(**fields) -> Play:
    request = REQUEST.model_copy(update=fields)
    episode = DialogueEpisode("r-0000", Problem.of("a", "b"), buffer=TokenBuffer([1, 2, 3]))
    return Play(episode, request, 0, 0, "scripted", False)


def draft_of(engine, play: Play, room: int = 500, tools: Toolbox | None = None, **more) -> SampledDraft:
    model = PolicyModel(engine, tools)
    ids, sampling = play.episode.buffer.ids, Sampling(0.7, max_tokens=400)
    return asyncio.run(sample_draft(play, model, ids, sampling, room, **more))


@pytest.fixture
def engine(tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, lambda prompt: "It is 42." if "tool_response" in prompt else f"See.{CALL}")


@pytest.fixture
def tools() -> Toolbox:
    return Toolbox([calculator])


@pytest.mark.parametrize(("greedy", "fixed", "room", "limit"), [(False, False, 500, 400), (True, True, 9, 9)])
def test_a_request_and_the_room_decide_how_a_message_is_sampled(engine, greedy, fixed, room, limit) -> None:
    draft_of(engine, play_of(greedy=greedy, fixed_seeds=fixed), room)
    ((prompt, sampling, _),) = engine.calls
    assert prompt == [1, 2, 3] and (sampling.temperature, sampling.max_tokens) == (0.0 if greedy else 0.7, limit)
    assert sampling.draw == ("r-0000", 0) and (sampling.seed is not None) == fixed


def test_a_message_without_its_end_token_is_closed_and_one_with_it_is_not(engine) -> None:
    end = (engine.frame.turn_end_id,)
    complete, cut = draft_of(engine, play_of()), draft_of(engine, play_of(), room=3, hint_ids=[9], opened="<think>\n")
    assert complete.turn.ended and complete.ids[-1:] == end and complete.given == ()
    assert not cut.turn.ended and len(cut.ids) == 3 and cut.given == end
    assert engine.calls[1][0] == [1, 2, 3, 9] and cut.hint_ids == (9,) and cut.turn.text.startswith("<think>\n")


@pytest.mark.parametrize(("part", "other"), [(1, {"weights": "others"}), (2, {"policy": None})])
def test_each_part_of_a_message_must_come_from_the_weights_of_its_batch(engine, tools, part: int, other: dict) -> None:
    """Other weights are loaded before or after the call of a tool."""
    play, generate = play_of(run_id="", policy_version=0), engine.generate
    assert draft_of(engine, play, tools=tools).turn.tool_calls
    engine.calls.clear()

    async def changing(prompt_ids, sampling) -> Completion:
        answer = await generate(prompt_ids, sampling)
        return replace(answer, **other) if len(engine.calls) == part else answer

    engine.generate = changing
    with pytest.raises(PolicyMismatch):
        draft_of(engine, play, tools=tools)


def test_a_replay_gives_the_context_that_was_sampled(engine, tools, tmp_path: Path) -> None:
    play, journal = play_of(), Journal(tmp_path)
    journal.append("batch", request="r", weights="", body="")
    episode = play.episode
    message = unreviewed(draft_of(engine, play, tools=tools), (0, 0))
    turn = add_policy_message(journal, episode, message, {"prompt_ids": episode.buffer.prompt_ids})
    assert turn.span == (0, len(message.ids)) and set(episode.buffer.mask) == {0, 1}
    assert turn.tool_calls[0].result == "42"
    replayed = DialogueEpisode(episode.id, episode.problem)
    assert [replay_event(replayed, event) for event in journal.events(episode.id)] == [turn]
    assert vars(replayed.buffer) == vars(episode.buffer)
    assert replay_event(replayed, {"event": "rewards"}) is None
