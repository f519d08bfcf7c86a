"""The tutor that answers a benchmark: an engine in this process, a model behind an API, or a running server's `/v1`."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.models import ApiModelConfig
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi
from classroom_rl.errors import ContextOverflow, PolicyMismatch, RequestRefused
from classroom_rl.evaluation.progress import EvaluationProgress, gather_or_stop
from classroom_rl.evaluation.published.labellers import TOO_LONG, cause_of
from classroom_rl.judges.model_judge import ApiChatEngine
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.server.auth import TOKEN_VARIABLE, token_from_environment
from classroom_rl.server.client import ClassroomClient
from classroom_rl.server.open_models import open_chat_engine
from classroom_rl.server.openai_routes import TEACHER

if TYPE_CHECKING:
    from classroom_rl.engines.vllm.engine import VllmEngine

EMPTY = "empty"
"""The cause of failure of a reply without any text that a student would see."""

USER, SYSTEM, BARE = "user", "system", "bare"
"""How a prompt is sent: as the only message of a chat, of this role, or without a chat template, to be continued."""


@dataclass
class Replies:
    """A tutor's replies.

    Attributes:
        texts: the reply to each prompt, as a student sees it; None without one.
        failures: cause → the number of prompts without a reply.
        cut: the number of replies that reached the token limit.
    """

    texts: list[str | None] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    cut: int = 0


@dataclass
class BenchmarkTutor:
    """The tutor that is measured.

    Attributes:
        name: the model's name.
        policy: the policy version of a running server; otherwise None.
        api: the client of a model behind an API; None for an engine in this process.
    """

    name: str
    engine: "ApiChatEngine | VllmEngine"
    sampling: Sampling
    policy: str | None = None
    api: ChatApi | None = None

    async def answer(self, prompts: Sequence[str], label: str) -> Replies:
        """The tutor's reply to each prompt, which is sent as a single user message. A refused prompt has no reply and
        is counted as a failure, as is a reply that is empty without its thoughts. Raises `EngineFailure` or
        `ProviderFailure` if the tutor cannot be asked at all."""
        replies = await self.answer_as(USER, prompts, (), label)
        replies.failures[EMPTY] += replies.texts.count("")
        replies.failures = +replies.failures  # without causes that never occurred
        replies.texts = [text or None for text in replies.texts]
        return replies

    async def answer_as(self, form: str, prompts: Sequence[str], stop: Sequence[str], label: str) -> Replies:
        """The tutor's reply to each prompt, up to the first of the texts in `stop`, and without thoughts. It may be
        empty. Otherwise as `answer`.

        Args:
            form: how a prompt is sent, `USER`, `SYSTEM` or `BARE`.
        """
        replies = Replies()
        sampling = replace(self.sampling, stop=tuple(stop))

        async def ask(prompt: str) -> str | None:
            try:
                reply = await self._reply(form, prompt, sampling)
            except (RequestRefused, ContextOverflow) as error:
                replies.failures[TOO_LONG if isinstance(error, ContextOverflow) else cause_of(error)] += 1
                return None
            finally:
                progress.add(1)
            replies.cut += not reply.ended
            text = reply.text if form == SYSTEM and "think>" not in reply.text else visible_text(reply.text)
            for end in stop:
                text = text.split(end, 1)[0]
            return text.strip() if form == BARE else text

        with EvaluationProgress(len(prompts), label, "replies") as progress:
            replies.texts = await gather_or_stop(map(ask, prompts))
        return replies

    async def _reply(self, form: str, prompt: str, sampling: Sampling) -> Completion:
        if form != BARE:
            return await self.engine.chat([{"role": form, "content": prompt}], sampling)
        if isinstance(self.engine, ApiChatEngine):
            return await self.engine.complete(prompt, sampling)
        return await self.engine.generate(self.engine.tokenizer(prompt)["input_ids"], sampling)

    def about(self) -> dict[str, object]:
        """The entries of metrics.json about the tutor."""
        paid = None if self.api is None else asdict(self.api.ledger.spending())
        return {"tutor": self.name, "policy": self.policy, "temperature": self.sampling.temperature, "paid": paid}


@asynccontextmanager
async def open_tutor(config: EvalConfig, folder: Path) -> AsyncIterator[BenchmarkTutor]:
    """Open `teacher_model`, or the tutor of the server at `server_url`.

    A model behind an API is not paid twice for the same prompt in the same folder. A server's replies are kept
    separately for each policy version.

    Raises:
        ConfigError: if a model's folder is missing or damaged, or a key is missing.
        DeadlineExceeded: if the server does not answer.
        PolicyMismatch: if the server's tutor changed while it was measured.
    """
    model, generation = config.teacher_model, config.generation
    sampling = Sampling.of(model.vllm, generation.max_tokens_per_turn)
    if config.server_url is not None:
        client = ClassroomClient(config.server_url)
        policy = client.health().policy
        # The policy is part of the request's key in the ledger: another policy's replies are not reused.
        sampling = replace(sampling, draw=(str(policy), config.seed))
        async with _behind_api(_served_model(config), folder, sampling) as tutor:
            tutor.policy = str(policy)
            yield tutor
        if (policy_now := client.health().policy) != policy:
            raise PolicyMismatch(
                f"The tutor changed while it was measured: from {policy} to {policy_now}. Evaluate when no training "
                "publishes to this server."
            )
    elif model.is_remote:
        async with _behind_api(model, folder, replace(sampling, draw=(config.seed,))) as tutor:
            yield tutor
    else:
        engine = await open_chat_engine("teacher", model, generation, config.seed)
        try:
            yield BenchmarkTutor(model.model_name_or_path, engine, replace(sampling, seed=config.seed))
        finally:
            engine.shutdown()


def _served_model(config: EvalConfig) -> ApiModelConfig:
    """A server's tutor behind its `/v1`, with the limits and the temperature of `teacher_model`."""
    return replace(
        config.teacher_model,
        model_name_or_path=TEACHER,
        base_url=f"{config.server_url.rstrip('/')}/v1",
        use_openrouter=False,
        use_gemini=False,
        api_key_env=None if token_from_environment() is None else TOKEN_VARIABLE,
        fallback_models=[],
    )


@asynccontextmanager
async def _behind_api(model: ApiModelConfig, folder: Path, sampling: Sampling) -> AsyncIterator[BenchmarkTutor]:
    ledger = CallLedger(folder / "teacher_calls.sqlite", model.max_cost_usd)
    try:
        api = ChatApi(model, ledger, "teacher")
        try:
            yield BenchmarkTutor(model.model_name_or_path, ApiChatEngine(model, api), sampling, api=api)
        finally:
            await api.drain()
    finally:
        ledger.close()
