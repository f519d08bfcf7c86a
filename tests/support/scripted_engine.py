"""Engines whose text comes from a script, for tests of the classroom without a model."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from classroom_rl.models.policy_folder import check_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message, ReplyFrame, encode_text
from classroom_rl.rollout.engine import Completion, EngineHealth, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Script = Callable[[str], str]
"""Prompt as text → the answer."""


class ScriptedEngine:
    """A teacher or student role whose lines come from a script.

    Lines are tokenised with a real tokenizer and cut at the sampling's `max_tokens`, as an engine would. Spellings of
    special tokens become special tokens, as if the model had sampled them. `calls` keeps every prompt and answer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", script: Script):
        self.tokenizer = tokenizer
        self.frame = ReplyFrame(tokenizer)
        self.policy = PolicyVersion()
        self.weights = "scripted"
        self.calls: list[tuple[list[int], Sampling, Completion]] = []
        self._script = script

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        line = self._script(self.tokenizer.decode(prompt_ids, skip_special_tokens=False))
        ids = [*self.tokenizer.encode(line, add_special_tokens=False), self.frame.turn_end_id]
        ended = len(ids) <= sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        logprobs = tuple(-0.01 * (i + 1) for i in range(len(ids)))
        completion = Completion(tuple(ids), logprobs, text, ended, self.policy, weights=self.weights)
        self.calls.append((list(prompt_ids), sampling, completion))
        return completion

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        markup = [f"<{message['role']}>{message['content']}" for message in messages]
        return await self.generate(encode_text(self.tokenizer, "\n".join(markup)), sampling)

    async def load_policy(self, folder: Path, policy: PolicyVersion, timeout_s: float) -> None:
        """Load a policy that exists on disk; raises the errors of a vLLM engine."""
        self.weights = check_policy(folder, policy)
        self.policy = policy

    def health(self) -> EngineHealth:
        return EngineHealth(model="scripted", engine="scripted", engine_version="", pids=[])

    def check_alive(self) -> None:
        """Do nothing: no process runs."""

    def shutdown(self) -> None:
        """Do nothing: no process runs."""


class ScriptedJudge:
    """A judge whose answers come from a function of (rule, conversation, attempt), which may raise."""

    def __init__(self, answer: Callable[[str, list[dict[str, str]], int], str]):
        self._answer = answer

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        await asyncio.sleep(0)
        return self._answer(rule, conversation, attempt)
