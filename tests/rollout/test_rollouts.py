"""Many rollouts at once: which settings they take, what is kept if they are stopped, and replays."""

import asyncio
from dataclasses import replace

import pytest

from classroom_rl import Rollouts, RolloutSet, calculator
from classroom_rl.errors import ConfigError, RolloutsStopped
from classroom_rl.rollout.step import End
from tests.support.played_rollouts import always, echo, play
from tests.support.scripted_chat import ScriptedChat


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 0},
        {"history": "all"},
        {"seed": -1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": 0},
        {"max_tokens": 2.5},
        {"concurrency": 0},
        {"tools": [len]},
        {"tools": [calculator, calculator]},
        {"tools": [lambda x: x]},
    ],
)
def test_settings_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)).rstrip("s")):
        Rollouts(ScriptedChat(echo), **options)


def test_what_is_no_engine_and_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no engine"):
        Rollouts("gpt")
    with pytest.raises(ConfigError, match="stop is 'never'"):
        play(ScriptedChat(echo), ["a"], stop="never")


def test_what_was_done_before_an_error_is_not_lost() -> None:
    def next_prompt(rollout, step: int) -> str | None:
        if rollout.prompt_index == 0:
            return None
        if step == 4:
            raise RuntimeError("broken")
        return "again"

    runner = Rollouts(ScriptedChat(echo))
    with pytest.raises(RolloutsStopped, match="1 of 2 rollouts had ended") as stopped:
        asyncio.run(runner.run(["a", "b"], next_prompt, reward=lambda rollout: 1.0, progress=False))
    finished, broken = stopped.value.done
    assert finished.terminated and finished.reward == 1.0
    assert broken.end is None and len(broken.steps) == 4
    assert runner.so_far == stopped.value.done
    assert "unfinished" in str(stopped.value.done.summary())


def test_what_was_done_before_an_interruption_is_not_lost() -> None:
    async def interrupted() -> RolloutSet:
        runner = Rollouts(ScriptedChat(echo), max_steps=10**6)
        task = asyncio.create_task(runner.run(["a"], next_prompt=always, progress=False))
        while not (runner.so_far and len(runner.so_far[0].steps) > 3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return runner.so_far

    (rollout,) = asyncio.run(interrupted())
    assert rollout.end is None and len(rollout.steps) > 3


# All at once ---------------------------------------------------------------------------------------------------------


def test_no_rollout_waits_for_the_step_of_another_one() -> None:
    """The first message of one rollout comes only after the other one has ended with all its steps."""

    async def both() -> RolloutSet:
        ended = asyncio.Event()

        async def answers(messages) -> str:
            if messages[0]["content"] == "slow":
                await asyncio.wait_for(ended.wait(), 60)
            return "yes"

        def next_prompt(rollout, step: int) -> str | None:
            if step < 5:
                return "again"
            ended.set()
            return None

        return await Rollouts(ScriptedChat(answers)).run(["slow", "fast"], next_prompt=next_prompt, progress=False)

    slow, fast = asyncio.run(both())
    assert len(slow.steps) == len(fast.steps) == 5
    assert fast.steps[-1].finished <= slow.steps[0].finished


def test_no_more_rollouts_than_allowed_are_in_play() -> None:
    now, most = 0, 0

    async def answers(messages) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return "yes"

    rollouts = play(ScriptedChat(answers), [f"p{n}" for n in range(12)], concurrency=3)
    assert (most, len(rollouts)) == (3, 12)
    assert [rollout.first_prompt for rollout in rollouts] == [f"p{n}" for n in range(12)]


def test_the_progress_bar_shows_rollouts_and_steps(capsys) -> None:
    runner = Rollouts(ScriptedChat(echo), max_steps=2)
    asyncio.run(runner.run(["a", "b"], next_prompt=always))
    output = capsys.readouterr().err
    assert "2/2" in output and "4 steps" in output


# Replay --------------------------------------------------------------------------------------------------------------


def replayed(engine: ScriptedChat, recorded: RolloutSet, **functions) -> RolloutSet:
    return asyncio.run(Rollouts(engine).replay(recorded, progress=False, **functions))


def test_a_replay_asks_the_same_questions_with_the_same_seeds_and_settings() -> None:
    engine, replay_engine = ScriptedChat(echo), ScriptedChat(echo)
    options = {"max_steps": 4, "history": "with_thinking", "temperature": 0.5, "max_tokens": 9}

    def stop(rollout, last) -> str | bool:
        return rollout.prompt_index == 1 and last.index == 1 and "enough"

    rollouts = play(engine, ["a", "b"], always, stop, lambda rollout: 2.0, **options)
    repeated = replayed(replay_engine, rollouts)
    assert sorted(map(str, replay_engine.calls)) == sorted(map(str, engine.calls))

    def as_played(rollouts: RolloutSet) -> list:
        """The rollouts without times and rewards."""
        return [
            replace(rollout, reward=None, steps=[replace(step, started=0, finished=0) for step in rollout.steps])
            for rollout in rollouts
        ]

    assert as_played(repeated) == as_played(rollouts) and [rollout.reward for rollout in repeated] == [None, None]


def test_a_replay_with_functions_is_played_by_them() -> None:
    rollouts = play(ScriptedChat(echo), ["a"], always, max_steps=5)
    rollouts[0].notes["old"] = 1
    (repeated,) = replayed(
        ScriptedChat(echo), rollouts, next_prompt=lambda rollout, step: "other" if step < 2 else None
    )
    assert [step.prompt for step in repeated.steps] == ["a", "other"]
    assert repeated.end == End("terminated", "no next prompt") and repeated.notes == {}


def test_a_replay_leaves_rollouts_without_steps_as_they_are() -> None:
    failed = play(ScriptedChat(lambda messages: ValueError("boom")), ["a"])
    assert replayed(ScriptedChat(echo), failed) == failed
