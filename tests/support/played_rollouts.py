"""Rollouts of the library, played on scripted engines or written by hand."""

import asyncio
import math
from typing import Any

from classroom_rl import Rollout, Rollouts, RolloutSet, Step
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.step import End, Settings

SETTINGS = Settings("HfEngine tiny", "without_thinking", 50, 1.0, 0.9, -1, 64)


def play(engine: Any, prompts: Any, next_prompt=None, stop=None, reward=None, copies=1, **options: Any) -> RolloutSet:
    """Play rollouts; `options` are those of `Rollouts`."""
    runner = Rollouts(engine, **options)
    return asyncio.run(runner.run(prompts, next_prompt, stop, reward, copies, progress=False))


def echo(messages) -> str:
    return f"<think>hm {len(messages)}</think>You said: {messages[-1]['content']}"


def always(_rollout, step: int) -> str:
    """A next prompt that never ends a rollout."""
    return f"question {step}"


def made(
    number: int, reward: float | None = None, length: int = 2, end: End | None = None, prompt: int | None = None
) -> Rollout:
    """A recorded rollout with ids, whose prompts continue each other."""
    steps: list[Step] = []
    for index in range(length):
        before = steps[-1].prompt_ids + steps[-1].ids if steps else ()
        messages = (*(steps[-1].messages if steps else ()), {"role": "user", "content": f"Frage {index} — 你好 \u2028"})
        steps.append(
            Step(
                index=index,
                prompt=messages[-1]["content"],
                messages=messages,
                text="<think>hm</think>so",
                content="so",
                thought="hm",
                thought_state="closed",
                prompt_ids=(*before, number, index),
                ids=(7, 8, 9),
                mask=(1, 1, 1),
                logprobs=(-0.1, -1e-300, -math.pi),
                tokens=3,
                finish_reason="stop",
                policy=PolicyVersion("run", number),
                seed=number,
                started=1.7e9 + 0.1,
                finished=1.7e9 + 0.3,
            )
        )
    return Rollout(
        id=f"{number}-0",
        prompt_index=number if prompt is None else prompt,
        copy=0,
        seed=number,
        opening=(),
        first_prompt="Frage 0",
        settings=SETTINGS,
        meta={"a": None},
        steps=tuple(steps),
        end=End("terminated", "stop") if end is None else end,
        reward=reward,
    )
