"""What rollouts begin with: the prompts that a user gives, checked, and the seeds derived from them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from classroom_rl.errors import DataError
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.step import Rollout, Settings
from classroom_rl.rollout.text import has_surrogates

Prompt = str | Problem | Mapping[str, Any] | Sequence[Message]
"""A text; a problem of a dataset; {"prompt": text, …} with further entries for `Rollout.meta`; or messages that end
with the user's."""
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Start:
    """The messages before the first prompt, that prompt, and the meta of its rollouts."""

    opening: tuple[Message, ...]
    prompt: str
    meta: dict[str, Any]


def starts_of(prompts: Iterable[Prompt], system: str | None) -> list[Start]:
    """The beginnings of rollouts, one for each prompt.

    Args:
        system: the system message of all prompts that bring none themselves; None for no system message.

    Raises:
        DataError: if there is no prompt, or one is malformed; the message names its position.
    """
    if isinstance(prompts, str | bytes | Mapping):
        raise DataError(f"prompts is a list of prompts, not one {type(prompts).__name__}: put it into [ ].")
    found = []
    for place, prompt in enumerate(prompts):
        try:
            found.append(_start_of(prompt, system))
        except ValueError as error:
            raise DataError(f"Prompt {place} cannot be used: {error}.") from None
    if not found:
        raise DataError("There are no prompts: give at least one.")
    return found


def _start_of(prompt: Prompt, system: str | None) -> Start:
    meta: dict[str, Any] = {}
    if isinstance(prompt, Problem):
        meta = {"problem_id": prompt.id, "answer": prompt.answer}
        prompt = prompt.text
    elif isinstance(prompt, Mapping):
        if "prompt" not in prompt:
            raise ValueError(f"it has no entry prompt, but {', '.join(map(str, prompt)) or 'none'}")
        meta = deepcopy({key: value for key, value in prompt.items() if key != "prompt"})
        prompt = prompt["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _checked(prompt)
    for message in messages:
        check_text(message["content"])
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Start(tuple(messages[:-1]), messages[-1]["content"], meta)


def _checked(messages: Any) -> list[Message]:
    """The messages of a conversation that the user is about to continue."""
    if not isinstance(messages, Sequence) or isinstance(messages, bytes) or not messages:
        raise ValueError(f"it is {messages!r}, and neither text, nor a problem, nor a list of messages")
    for message in messages:
        whole = isinstance(message, Mapping) and set(message) == {"role", "content"}
        if not whole or message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise ValueError(
                f"{message!r} is no message: it needs a role ({', '.join(_ROLES)}) and a content, both text"
            )
    if messages[-1]["role"] != "user":
        raise ValueError(f"its last message is the {messages[-1]['role']}'s; it must be the user's")
    if any(message["role"] == "system" for message in messages[1:]):
        raise ValueError("only its first message may be the system's")
    return [dict(message) for message in messages]


def check_text(text: Any) -> str:
    """A prompt's text, unchanged.

    Raises:
        ValueError: if it is no text, has no words, or cannot be stored.
    """
    if not isinstance(text, str):
        raise ValueError(f"it is {text!r}, which is no text")
    if not text.strip():
        raise ValueError("it is empty")
    if has_surrogates(text):
        raise ValueError(f"{text[:60]!r} holds half of a character (a lone surrogate), which is no Unicode text")
    return text


def rollouts_of(starts: Sequence[Start], copies: int, seed: int, settings: Settings) -> Iterator[Rollout]:
    """The rollouts before their first steps: `copies` for each start, in order.

    Each has a seed of its own, derived from (seed, prompt, copy). Equal prompts are told apart by their number among
    each other, so a rollout's seed does not depend on the prompts beside it.
    """
    seen: Counter[str] = Counter()
    for place, start in enumerate(starts):
        text = json.dumps([start.opening, start.prompt])
        for copy in range(copies):
            own = derive_seed(seed, text, seen[text], copy)
            meta = deepcopy(start.meta)
            yield Rollout(f"{place}-{copy}", place, copy, own, start.opening, start.prompt, settings, meta)
        seen[text] += 1


def derive_seed(*parts: str | int) -> int:
    """A seed of 32 bits that depends on the parts and nothing else; the same in every process and on every machine."""
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:4])
