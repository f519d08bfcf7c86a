"""The routes of agents: OpenAI's chat completions for each episode, its reward, and the next episode to play."""

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, FiniteFloat

from classroom_rl.environments.agent.environment import BadCall, Environment
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.environment import POLICY_ROLE
from classroom_rl.rollout.extensions import OpenServer

_NOTHING = (None, False, "", [], {})
_FOR_NOBODY = ("user", "metadata", "store")
"""Fields of a call that change nothing for the policy."""


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel, extra="allow"):
    """A message of OpenAI's API, of text alone."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def plain(self) -> Message:
        """The message as the chat template takes it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role.replace("developer", "system"), "content": "".join(parts)}


class ChatBody(BaseModel, extra="allow"):
    """Body of `POST /agent/{key}/v1/chat/completions`; the fields of OpenAI's API that are not here are refused."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def refuse_what_is_not_trained(self, temperature: float, top_p: float) -> None:
        """Refuse a call that asks for something else than the samples that are trained on.

        Raises:
            BadCall: with the first field that does.
        """
        neutral = {"n": 1, "temperature": temperature, "top_p": top_p, "presence_penalty": 0, "frequency_penalty": 0}
        message_fields = {f"messages.{index}.{name}": value for index, message in enumerate(self.messages)
                 for name, value in (message.model_extra or {}).items()}  # fmt: skip
        for name, value in ((self.model_extra or {}) | message_fields).items():
            if value not in _NOTHING and name not in _FOR_NOBODY and (name not in neutral or value != neutral[name]):
                raise BadCall(
                    f"{name} is {str(value)[:200]!r}. The policy is sampled as its training needs it: temperature "
                    f"{temperature:g}, top_p {top_p:g}, one whole answer of text, no stream, no tools. Leave it out."
                )
        if self.model != POLICY_ROLE:
            raise BadCall(f"There is no model {self.model!r} here; the policy is called {POLICY_ROLE!r}.")
        if self.messages[-1].role == "assistant":
            raise BadCall("The last message is the assistant's: the policy begins its messages itself.")


class RewardBody(BaseModel):
    """Body of `POST /agent/{key}/reward`, which ends the episode."""

    reward: FiniteFloat


class NextEpisode(BaseModel):
    """Response of `POST /agent/next`: an episode for the agent that asked. Its calls go to `base_url`, the reward to
    `reward_url`."""

    base_url: str
    reward_url: str
    problem: str
    answer: str


def open_for(server: OpenServer) -> Environment:
    """The environment, which has the sessions."""
    environment = server.episodes.environment
    assert isinstance(environment, Environment)
    return environment


def add_routes(router: APIRouter, opened: Callable[[], Environment]) -> None:
    """Add the routes of agents."""

    @router.post("/agent/next")
    async def next_episode(request: Request) -> NextEpisode | None:
        """An episode that no agent has taken yet; null if there is none now: ask again in a second."""
        session = opened().take()
        if session is None:
            return None
        url, problem = f"{request.base_url}agent/{session.key}", session.play.episode.problem
        return NextEpisode(
            base_url=f"{url}/v1", reward_url=f"{url}/reward", problem=problem.text, answer=problem.answer
        )

    @router.post("/agent/{key}/v1/chat/completions")
    async def chat(key: str, body: ChatBody, request: Request) -> dict[str, Any]:
        environment = opened()
        body.refuse_what_is_not_trained(*environment.sampling)
        messages = [message.plain for message in body.messages]
        max_tokens = body.max_completion_tokens or body.max_tokens
        turn, prompt_tokens = await environment.answer(key, messages, max_tokens, request.is_disconnected)
        message = {"role": "assistant", "content": turn.text}
        return {
            "id": f"chatcmpl-{key}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop" if turn.ended else "length"}],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": turn.tokens,
                "total_tokens": prompt_tokens + turn.tokens,
            },
        }

    @router.post("/agent/{key}/reward", status_code=204)
    async def reward(key: str, body: RewardBody) -> None:
        opened().end(key, body.reward)
