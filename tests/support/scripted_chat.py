"""A model that is talked to, whose answers come from a function: an engine without tokens."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from classroom_rl.rollout.engine import Completion, Sampling

Answer = str | Exception
Answers = Callable[[Sequence[dict[str, str]]], Answer | Awaitable[Answer]]


@dataclass
class ScriptedChat:
    """A `ChatEngine`. An answer that is an exception is raised; one that ends with … was cut. `calls` keeps what it was
    asked, `alive` is what `check_alive` says."""

    answers: Answers
    alive: Exception | None = None
    calls: list[tuple[list[dict[str, str]], Sampling]] = field(default_factory=list)

    async def chat(self, messages: Sequence[dict[str, str]], sampling: Sampling) -> Completion:
        self.calls.append((list(messages), sampling))
        answer = self.answers(messages)
        answer = await answer if inspect.isawaitable(answer) else answer
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return Completion((), (), answer, not answer.endswith("…"), counted=len(answer.split()))

    def check_alive(self) -> None:
        if self.alive is not None:
            raise self.alive
