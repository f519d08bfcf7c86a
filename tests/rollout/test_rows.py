"""Training samples: of rollouts, with the history that the model saw, and of episodes, with their auxiliary samples."""

from dataclasses import replace

import pytest

from classroom_rl.errors import DataError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.rows import rows_of, rows_of_rollout
from classroom_rl.rollout.tokens import AuxSample, Turn
from classroom_rl.rollout.trajectory import Trajectory
from tests.support.played_rollouts import always, echo, made, play
from tests.support.scripted_chat import ScriptedChat
from tests.support.scripted_engine import ScriptedEngine


def test_with_thoughts_a_rollout_is_one_row_of_what_was_sampled(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: f"<think>so {prompt.count('user')}</think>Number 7.")
    rollouts = play(engine, ["Say a number."], always, max_steps=3, history="with_thinking")
    (rollout,), (row,) = rollouts, rollouts.rows()
    assert row.prompt_ids == list(rollout.steps[0].prompt_ids)
    assert row.prompt_ids + row.completion_ids == [*rollout.steps[-1].prompt_ids, *rollout.steps[-1].ids]
    sampled = [index for index, bit in enumerate(row.mask) if bit]
    assert [(row.completion_ids[i], row.logprobs[i], row.messages[i]) for i in sampled] == [
        (token, logprob, step.index)
        for step in rollout.steps
        for token, logprob in zip(step.ids, step.logprobs, strict=True)
    ]
    assert all(logprob == 0 for logprob, bit in zip(row.logprobs, row.mask, strict=True) if not bit)


def test_without_thoughts_each_step_is_a_row_with_a_prompt_of_its_own(tiny_tokenizer) -> None:
    engine = ScriptedEngine(tiny_tokenizer, lambda prompt: "<think>secret</think>Number 7.")
    rollouts = play(engine, ["Say a number."], always, reward=lambda rollout: [0.25, None], copies=2, max_steps=2)
    rows = rollouts.rows()
    assert [(row.conversation_id, row.message, row.reward) for row in rows] == [
        ("0-0", 0, 0.25),
        ("0-0", 1, None),
        ("0-1", 0, 0.25),
        ("0-1", 1, None),
    ]
    prompt = tiny_tokenizer.decode(rows[1].prompt_ids)
    assert "Number 7." in prompt and "secret" not in prompt
    assert all(row.mask == [1] * len(row.completion_ids) and not any(row.target) for row in rows)


def test_rows_need_tokens() -> None:
    with pytest.raises(DataError, match="ScriptedChat gives text alone"):
        play(ScriptedChat(echo), ["a"]).rows()


def test_a_prompt_that_does_not_continue_the_one_before_is_refused() -> None:
    rollout = made(0)
    rollout = replace(rollout, settings=replace(rollout.settings, history="with_thinking"))
    broken = replace(rollout, steps=(rollout.steps[0], replace(rollout.steps[1], prompt_ids=(1, 2))))
    assert len(rows_of_rollout(rollout)) == 1 and rows_of_rollout(replace(rollout, steps=())) == []
    with pytest.raises(DataError, match="step 1 of rollout 0-0 does not continue"):
        rows_of_rollout(broken)


# Episodes ------------------------------------------------------------------------------------------------------------

VERSION = PolicyVersion("run", 1)


def episode(*aux_samples: AuxSample) -> Trajectory:
    """Two messages of the policy, the ids 10 11 12 and 13 14, with the student's 90 91 between them."""
    turns = [
        Turn("teacher", "Hi.", span=(0, 3), policy=VERSION),
        Turn("student", "Hello."),
        Turn("teacher", "Bye.", span=(5, 7), policy=VERSION),
    ]
    return Trajectory(
        id="r-0000",
        request_id="r",
        step=0,
        index=0,
        problem_id="",
        problem="",
        answer="",
        rewards={},
        reward=None,
        turns=turns,
        prompt_ids=[1, 2],
        completion_ids=[10, 11, 12, 90, 91, 13, 14],
        mask=[1, 1, 1, 0, 0, 1, 1],
        logprobs=[-0.1, -0.2, -0.3, 0.0, 0.0, -0.4, -0.5],
        branches=list(aux_samples),
        meta={},
    )


def test_the_whole_conversation_is_one_row_that_knows_whose_token_is_whose() -> None:
    (row,) = rows_of(episode())
    assert (row.kind, row.message, row.prompt_ids, row.completion_ids) == (
        "policy",
        None,
        [1, 2],
        [10, 11, 12, 90, 91, 13, 14],
    )
    assert row.messages == [0, 0, 0, -1, -1, 1, 1] and row.mask == [1, 1, 1, 0, 0, 1, 1] and not any(row.target)


@pytest.mark.parametrize(
    ("sample", "row"),
    [
        (
            AuxSample("draft", 2, 5, (20, 21), (-1.0, -2.0), hint_ids=(80,), reward=-0.5, draft=0),
            {
                "prompt_ids": [1, 2],
                "completion_ids": [10, 11, 12, 90, 91, 80, 20, 21],
                "mask": [0] * 6 + [1, 1],
                "target": [0] * 8,
                "logprobs": [0.0] * 6 + [-1.0, -2.0],
                "messages": [-1] * 6 + [1, 1],
                "reward": -0.5,
            },
        ),
        (
            AuxSample("correction", 2, 5, (13, 30)),
            {
                "completion_ids": [10, 11, 12, 90, 91, 13, 30],
                "mask": [0] * 7,
                "target": [0] * 5 + [1, 1],
                "logprobs": [0.0] * 7,
                "reward": None,
                "unchanged": 1,
            },
        ),
        (
            AuxSample("policy", 2, 0, (13, 70, 14), (-0.4, 0.0, -0.5), mask=(1, 0, 1), prompt_ids=(5, 6)),
            {
                "prompt_ids": [5, 6],
                "completion_ids": [13, 70, 14],
                "mask": [1, 0, 1],
                "logprobs": [-0.4, 0.0, -0.5],
                "messages": [1, -1, 1],
            },
        ),
    ],
    ids=["draft", "correction", "own prompt"],
)
def test_an_auxiliary_sample_is_a_row_behind_its_context(sample: AuxSample, row: dict) -> None:
    built = rows_of(episode(sample))[1]
    assert (built.conversation_id, built.kind, built.message) == ("r-0000", sample.kind, 1)
    assert {name: getattr(built, name) for name in row} == row
