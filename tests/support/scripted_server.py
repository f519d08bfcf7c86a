"""`vllm_server.py` with scripted engines in place of vLLM's; locks, journal, ledgers, judge and supervisor are real.

    python -m tests.support.scripted_server --config-name quickstart logging.save_dir=…

It takes the same arguments. Teacher and student say one of a few lines, drawn at random, so that rewards differ. Two of
three times the teacher says what the quickstart's ideal teacher would: the supervisor's rules find nothing wrong with
it, so that a model is asked. Each message takes about `SCRIPTED_MESSAGE_S` seconds (an environment variable; 0 if it is
not set). Each engine has a process that does nothing; the engine dies with it.
"""

import asyncio
import os
import random
import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial

import classroom_rl.server.open_models
import vllm_server
from classroom_rl.config.base import EnvironmentConfig
from classroom_rl.config.models import ModelConfig
from classroom_rl.environments.toy_language.scripted_teacher import plays_the_ideal
from classroom_rl.errors import EngineFailure
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.rollout.chat_template import Message, encode_chat
from classroom_rl.rollout.engine import Completion, EngineHealth, Sampling
from tests.support.receiving_teacher import ReceivingTeacher

MESSAGE_S = "SCRIPTED_MESSAGE_S"
LINES = {
    "teacher": (
        "Good. What do you do at home today?",
        "Well done, that is right! You cook soup at home.",
        "Almost. Look at the last word. Say it again.",
        "Good.",
    ),
    "student": ("I cook soup at home today.", "She go to school."),
}


_IDEAL_SHARE = 2 / 3
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


def line_of(role: str, prompt: str) -> str:
    """What a role says to this prompt."""
    if role == "teacher" and random.random() < _IDEAL_SHARE:
        return plays_the_ideal([{"role": role, "content": text} for role, text in _MESSAGE.findall(prompt)])
    return random.choice(LINES[role])


class PacedEngine(ReceivingTeacher):
    """A scripted engine that takes its time, keeps no prompts, and can be killed."""

    def __init__(self, role: str, model: ModelConfig, seconds: float):
        tokenizer = load_tokenizer(f"{role}_model", model.model_name_or_path)
        super().__init__(tokenizer, partial(line_of, role))
        self.calls = deque(maxlen=0)
        self._seconds = seconds
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # it ends when this process has ended

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        if self._seconds:
            await asyncio.sleep(random.uniform(0.5, 1.5) * self._seconds)
        self.check_alive()
        return await super().generate(prompt_ids, sampling)

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        return await self.generate(encode_chat(self.tokenizer, messages), sampling)

    def health(self) -> EngineHealth:
        return super().health().model_copy(update={"pids": [self._process.pid]})

    def check_alive(self) -> None:
        """Raise as a vLLM engine does whose process died."""
        if self._process.poll() is not None:
            raise EngineFailure("The scripted engine died.")

    def shutdown(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(10)

    async def sleep(self, timeout_s: float) -> None:
        """Do nothing: there is no memory to give back."""

    async def wake_up(self) -> None:
        """Do nothing."""


async def scripted_engines(wanted: dict[str, ModelConfig], _: EnvironmentConfig, __: int) -> dict[str, PacedEngine]:
    """In place of `_start_engines`."""
    seconds = float(os.environ.get(MESSAGE_S, "0"))
    return {role: PacedEngine(role, model, seconds) for role, model in wanted.items()}


def command(overrides: Sequence[str]) -> list[str]:
    """The command that starts such a server, from the project's folder."""
    return [sys.executable, "-m", "tests.support.scripted_server", *overrides]


def main() -> None:
    classroom_rl.server.open_models._start_engines = scripted_engines
    vllm_server.main()


if __name__ == "__main__":
    main()
