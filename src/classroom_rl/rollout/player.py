"""Plays one rollout: samples the model's messages, calls the user's functions between them, and records the end."""

import inspect
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from classroom_rl.errors import (
    ClassroomError,
    ConfigError,
    ContextOverflow,
    DataError,
    EngineFailure,
    ProviderFailure,
    RequestTooLong,
    RolloutsStopped,
)
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.histories import History
from classroom_rl.rollout.policy_turn import PolicyModel
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.scheduler import YieldGate
from classroom_rl.rollout.step import (
    BY_STOP,
    CONTEXT_FULL,
    ERROR,
    FAILED,
    LENGTH,
    MAX_STEPS,
    MAX_TOKENS,
    NO_NEXT_PROMPT,
    ONE_STEP,
    STOP,
    TERMINATED,
    TRUNCATED,
    End,
    Rollout,
    Settings,
    Step,
)
from classroom_rl.rollout.text import has_surrogates, without_surrogates
from classroom_rl.rollout.thoughts import split_message

Prompt = str | Problem | Mapping[str, Any] | Sequence[Message]
"""A text; a problem of a dataset; {"prompt": text, …} with further entries for `Rollout.meta`; or messages that end
with the user's."""
_ROLES = ("system", "user", "assistant")


def rollouts_of(
    prompts: Iterable[Prompt], system: str | None, copies: int, seed: int, settings: Settings
) -> Iterator[Rollout]:
    """The rollouts before their first steps: `copies` for each prompt, in order.

    Each has its own seed, derived from (seed, prompt, copy). Equal prompts are numbered among themselves, so that a
    rollout's seed does not depend on the other prompts.

    Args:
        system: the system message for all prompts without one; None for no system message.

    Raises:
        DataError: if there is no prompt, or one is malformed; the message names its position.
    """
    if isinstance(prompts, str | bytes | Mapping):
        raise DataError(f"prompts is a list of prompts, not one {type(prompts).__name__}: put it into [ ].")
    seen: Counter[str] = Counter()
    for index, prompt in enumerate(prompts):
        try:
            messages, meta = _messages_and_meta(prompt)
        except ValueError as error:
            raise DataError(f"Prompt {index} cannot be used: {error}.") from None
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        opening, first_prompt = tuple(messages[:-1]), messages[-1]["content"]
        text = json.dumps([opening, first_prompt])
        for copy in range(copies):
            rollout_seed = derive_seed(seed, text, seen[text], copy)
            id = f"{index}-{copy}"
            yield Rollout(id, index, copy, rollout_seed, opening, first_prompt, settings, deepcopy(meta))
        seen[text] += 1
    if not seen:
        raise DataError("There are no prompts: give at least one.")


def _messages_and_meta(prompt: Prompt) -> tuple[list[Message], dict[str, Any]]:
    """The messages of a prompt, which end with the user's, and its rollouts' `meta`. Raises a `ValueError` if it is
    malformed."""
    meta: dict[str, Any] = {}
    if isinstance(prompt, Problem):
        meta = {"problem_id": prompt.id, "answer": prompt.answer}
        prompt = prompt.text
    elif isinstance(prompt, Mapping):
        if "prompt" not in prompt:
            raise ValueError(f"it has no entry prompt, but {', '.join(map(str, prompt)) or 'none'}")
        meta = {key: value for key, value in prompt.items() if key != "prompt"}
        prompt = prompt["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _checked_messages(prompt)
    for message in messages:
        check_text(message["content"])
    return messages, meta


def _checked_messages(messages: Any) -> list[Message]:
    """The messages of a prompt, which end with the user's; raises a ValueError if they are malformed."""
    if not isinstance(messages, Sequence) or isinstance(messages, bytes) or not messages:
        raise ValueError(f"it is {messages!r}, and neither text, nor a problem, nor a list of messages")
    for message in messages:
        is_message = isinstance(message, Mapping) and set(message) == {"role", "content"}
        if not is_message or message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise ValueError(
                f"{message!r} is no message: it needs a role ({', '.join(_ROLES)}) and a content, both text"
            )
    if messages[-1]["role"] != "user":
        raise ValueError(f"its last message is the {messages[-1]['role']}'s; it must be the user's")
    if any(message["role"] == "system" for message in messages[1:]):
        raise ValueError("only its first message may be the system's")
    return [dict(message) for message in messages]


def check_text(text: Any) -> str:
    """Check a prompt's text, and return it unchanged. Raises a `ValueError` if it is no text, is empty, or cannot be
    stored."""
    if not isinstance(text, str):
        raise ValueError(f"it is {text!r}, which is no text")
    if not text.strip():
        raise ValueError("it is empty")
    if has_surrogates(text):
        raise ValueError(f"{text[:60]!r} holds half of a character (a lone surrogate), which is no Unicode text")
    return text


def derive_seed(*parts: str | int) -> int:
    """A seed of 32 bits that depends only on the parts; the same in every process and on every machine."""
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:4])


NextPrompt = Callable[[Rollout, int], str | None | Awaitable[str | None]]
Stop = Callable[[Rollout, Step], bool | str | None | Awaitable[bool | str | None]]
Score = float | None | Sequence[float | None]
Reward = Callable[[Rollout], Score | Awaitable[Score]]


@dataclass(frozen=True)
class Functions:
    """The user's functions; each may be plain or async. A plain one must not block: it would hold up all rollouts.

    Attributes:
        next_prompt: (rollout, index of the next step) → the next user message, or None if there is none.
        stop: (rollout, its last step) → True, or the reason as text, if the rollout is at its end.
        reward: (finished rollout) → a number, None (not scored), or a list with one of these for each step.
    """

    next_prompt: NextPrompt | None = None
    stop: Stop | None = None
    reward: Reward | None = None

    def __post_init__(self) -> None:
        for name, function in vars(self).items():
            if function is not None and not callable(function):
                raise ConfigError(f"{name} is {function!r}; it must be a function, or None.")


class Player:
    """Plays one rollout.

    Args:
        show: called with the rollout after each of its steps, and when it has ended.

    Attributes:
        rollout: the rollout so far.
    """

    def __init__(
        self,
        model: PolicyModel,
        rollout: Rollout,
        functions: Functions,
        show: Callable[[Rollout], None],
    ):
        self._engine = model.engine
        self._functions = functions
        self._show = show
        self._history = History(model, rollout)
        self.rollout = rollout

    async def play(self, gate: YieldGate) -> None:
        """Sample messages until the rollout ends, and then score it. It goes through the gate before each message, and
        before it is scored. Raises a `RolloutsStopped` if a function of the user raised an error or returned an invalid
        value, or if the engine cannot go on at all."""
        prompt = self.rollout.first_prompt
        while self.rollout.end is None:
            await gate.go_through()
            if await self._step(prompt):
                prompt = await self._next()
        self._show(self.rollout)
        await gate.go_through()
        await self._score()

    def _change(self, **changes: Any) -> None:
        self.rollout = replace(self.rollout, **changes)

    def _end(self, state: str, reason: str, detail: str = "", unanswered: str | None = None) -> None:
        self._change(end=End(state, reason, detail), unanswered=unanswered)

    # One message of the model ------------------------------------------------------------------------------------

    async def _step(self, prompt: str) -> bool:
        """Sample the model's next message; returns whether there is one. If not, the rollout has ended."""
        number = len(self.rollout.steps)
        try:
            step = await self._sample(prompt, number)
        except (ContextOverflow, RequestTooLong) as error:
            self._end(TRUNCATED, CONTEXT_FULL, str(error), prompt)
            return False
        except (ProviderFailure, ConfigError) as error:  # every other rollout would fail in the same way
            raise self._stopped("The engine cannot go on", error) from error
        except Exception as error:
            self._refuse_dead_engine()
            detail = str(error) if isinstance(error, ClassroomError) else f"{type(error).__name__}: {error}"
            self._end(FAILED, ERROR, detail, prompt)
            return False
        self._history.add(step)
        self._change(steps=(*self.rollout.steps, step))
        self._show(self.rollout)
        return True

    async def _sample(self, prompt: str, number: int) -> Step:
        settings = self.rollout.settings
        seed = derive_seed(self.rollout.seed, number)
        draw = (self.rollout.id, number)
        sampling = Sampling(
            settings.temperature, settings.top_p, settings.top_k, settings.max_tokens, seed=seed, draw=draw
        )
        messages, prompt_ids = self._history.messages(prompt), self._history.prompt_ids(prompt)
        started = time.time()
        answer = await self._history.sample(prompt, prompt_ids, sampling)
        if not all(math.isfinite(logprob) for logprob in answer.logprobs):
            raise EngineFailure(
                "The engine gave a log-prob that is infinite or NaN: the model's weights may be damaged."
            )
        text = without_surrogates(answer.text)
        split = split_message(text, self._history.opens_thought)
        return Step(
            index=number,
            prompt=prompt,
            messages=messages,
            text=text,
            content=split.content,
            thought=split.thought,
            thought_state=split.state,
            prompt_ids=tuple(prompt_ids),
            ids=tuple(answer.ids),
            mask=answer.mask,
            logprobs=tuple(answer.logprobs),
            tokens=answer.sampled,
            finish_reason=STOP if answer.ended else LENGTH,
            policy=answer.policy,
            seed=seed,
            started=started,
            finished=time.time(),
            tool_calls=answer.calls,
        )

    def _refuse_dead_engine(self) -> None:
        """Stop all rollouts if the engine is dead."""
        check_alive = getattr(self._engine, "check_alive", None)
        if check_alive is None:
            return
        try:
            check_alive()
        except ClassroomError as error:
            raise self._stopped("The engine is dead", error) from error

    # What comes next ---------------------------------------------------------------------------------------------

    async def _next(self) -> str | None:
        """The next prompt, unless the rollout has ended."""
        last, number = self.rollout.steps[-1], len(self.rollout.steps)
        stopped = await self._call("stop", self._functions.stop, last)
        if not (stopped is None or isinstance(stopped, str) or stopped in (True, False)):
            raise self._bad("stop", f"returned {stopped!r}; it must return True, False, None, or the reason as text")
        if stopped:
            return self._end(TERMINATED, BY_STOP, stopped if isinstance(stopped, str) else "")
        if self._functions.next_prompt is None:
            end = (TRUNCATED, MAX_TOKENS) if last.finish_reason == LENGTH else (TERMINATED, ONE_STEP)
            return self._end(*end)
        prompt = await self._call("next_prompt", self._functions.next_prompt, number)
        if prompt is None:
            return self._end(TERMINATED, NO_NEXT_PROMPT)
        try:
            check_text(prompt)
        except ValueError as error:
            raise self._bad("next_prompt", f"gave no prompt: {error}; None ends the rollout") from None
        if number >= self.rollout.settings.max_steps:
            return self._end(TRUNCATED, MAX_STEPS, unanswered=prompt)
        return prompt

    async def _score(self) -> None:
        if self._functions.reward is None:
            return
        value = await self._call("reward", self._functions.reward)
        try:
            self.rollout = self.rollout.scored(value)
        except ValueError as error:
            raise self._bad("reward", f"gave no reward: {error}") from None
        self._show(self.rollout)

    async def _call(self, name: str, function: Callable[..., Any] | None, *arguments: Any) -> Any:
        """What a function of the user returns; None without one."""
        if function is None:
            return None
        try:
            value = function(self.rollout, *arguments)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            raise self._stopped(f"The function {name} raised an error", error) from error

    def _bad(self, name: str, fault: str) -> RolloutsStopped:
        return self._stopped(f"The function {name} {fault}", None)

    def _stopped(self, cause: str, error: Exception | None) -> RolloutsStopped:
        number, id = len(self.rollout.steps), self.rollout.id
        detail = "" if error is None else f": {type(error).__name__}: {error}"
        return RolloutsStopped(f"{cause} in rollout {id} at step {number}{detail}", id, number)
