"""The classroom's routes of the server: the check of the judge, and the chat with the current teacher, in which the
user plays the student and the teacher gets the same prompt as in a lesson.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast
from uuid import uuid4

from fastapi import APIRouter
from pydantic import BaseModel, Field

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.conversation import ClassroomRules, Conversation
from classroom_rl.environments.classroom.judge_check import (
    JudgeCheck,
    JudgeCheckRequest,
    JudgeCheckResponse,
    open_judge_check,
)
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.environments.classroom.teacher import (
    chat_so_far,
    forced_ids,
    opened_thought,
    opening_turns,
    system_message,
    toolbox_of,
)
from classroom_rl.errors import DataError, DeadlineExceeded
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.extensions import OpenServer
from classroom_rl.rollout.policy_turn import PolicyModel
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.thoughts import split_thoughts, visible_text
from classroom_rl.rollout.tokens import Turn, approximate_tokens
from classroom_rl.rollout.tools.turn import SampledMessage


class ChatMessage(BaseModel):
    """A message in the chat."""

    role: Literal["teacher", "student"]
    text: str = Field(max_length=100_000)


class ChatBody(BaseModel):
    """Body of `POST /api/chat` and `POST /api/chat/opening`: the lesson, the student's name, the messages so far."""

    problem: str = Field(min_length=1, max_length=200_000)
    student_name: str | None = Field(None, max_length=200)
    turns: list[ChatMessage] = Field(default_factory=list, max_length=1000)


class ChatOpening(BaseModel):
    """Response of `POST /api/chat/opening`: the teacher's system message, the first messages, and who speaks next."""

    system: str
    turns: list[ChatMessage]
    next: Literal["teacher", "student"]


class ChatReply(BaseModel):
    """Response of `POST /api/chat`: the teacher's message. `over` is true if the message ends the conversation."""

    text: str
    parts: list[tuple[str, str]]
    tokens: int
    ended: bool
    over: bool
    policy: str


class ChatTutor(Protocol):
    """A tutor that the user can chat with."""

    def opening(self, request: ChatBody) -> ChatOpening: ...

    async def reply(self, request: ChatBody) -> ChatReply: ...


@dataclass(frozen=True)
class OpenClassroom:
    """What the routes of a running server use."""

    tutor: ChatTutor
    judge_check: JudgeCheck


def open_for(server: OpenServer) -> OpenClassroom:
    """Open the chat and the check of the judge of a running server.

    Raises:
        ConfigError: if the held-out judge's API key is missing.
        StorageError: if the ledger of the held-out judge's paid requests cannot be used.
    """
    roles = cast(Roles, server.episodes.environment.roles)
    tutor = ServerTutor(roles, server.config.generation, server.longest_reply_s)
    return OpenClassroom(tutor, open_judge_check(server))


def add_routes(router: APIRouter, opened: Callable[[], OpenClassroom]) -> None:
    """Add the classroom's routes."""

    @router.post("/check_judge")
    async def check_judge(body: JudgeCheckRequest) -> JudgeCheckResponse:
        return await opened().judge_check.run(body)

    @router.post("/api/chat/opening")
    def opening(body: ChatBody) -> ChatOpening:
        return opened().tutor.opening(body)

    @router.post("/api/chat")
    async def chat(body: ChatBody) -> ChatReply:
        return await opened().tutor.reply(body)


class ServerTutor:
    """The teacher of a running server.

    Args:
        longest_s: how long a reply may take, in seconds. It is limited because new weights from the trainer wait for
            replies in flight.
    """

    def __init__(self, roles: Roles, generation: GenerationConfig, longest_s: float):
        self._roles = roles
        self._generation = generation
        self._longest_s = longest_s
        self._policy = PolicyModel(roles.teacher, toolbox_of(generation))
        self._forced_ids, self._opened_thought = [], ""
        if roles.teacher_has_tokens:
            self._forced_ids = forced_ids(generation, roles.teacher.frame, roles.teacher.tokenizer)
            self._opened_thought = opened_thought(generation, roles.teacher.frame)

    @property
    def _conversation_type(self) -> ConversationType:
        """Which side opens the chat: the same side as in lessons, and the teacher if the lessons allow both."""
        forced = self._generation.forced_conversation_type
        return ConversationType.GUIDED if forced is None else ConversationType(forced.lower())

    def opening(self, request: ChatBody) -> ChatOpening:
        """Return the opening of a lesson on this problem."""
        opening = opening_turns(self._generation, request.problem, request.student_name)
        student_begins = bool(opening) or self._conversation_type is ConversationType.ATTEMPTED
        return ChatOpening(
            system=system_message(self._generation, request.problem, request.student_name),
            turns=[ChatMessage(role=turn.role, text=turn.text) for turn in opening],
            next="student" if student_begins else "teacher",
        )

    async def reply(self, request: ChatBody) -> ChatReply:
        """Generate the teacher's next message.

        Raises:
            DataError: if the context has no room left.
            DeadlineExceeded: if the reply takes too long, because the engine is busy or sleeps while a trainer uses
                its GPU.
        """
        messages = self._messages(request)
        try:
            async with asyncio.timeout(self._longest_s):
                message = await self._generate(messages)
        except TimeoutError:
            raise DeadlineExceeded(
                f"The teacher did not answer within {self._longest_s:g} s: its engine is busy, or sleeps while the "
                "trainer uses the GPU. Try again during the next rollout."
            ) from None
        return ChatReply(
            text=message.text,
            parts=split_thoughts(message.text),
            tokens=message.sampled,
            ended=message.ended,
            over=END_OF_CONVERSATION in visible_text(message.text),
            policy=str(message.policy),
        )

    async def _generate(self, messages: Sequence[Message]) -> SampledMessage:
        """Return the teacher's message."""
        sampling = self._roles.teacher_sampling
        if not self._roles.teacher_has_tokens:
            max_tokens = self._max_reply_tokens(sum(approximate_tokens(message["content"]) for message in messages))
            # a new `draw` each time, so that no stored reply to the same messages is returned
            sampling = replace(sampling, max_tokens=max_tokens, draw=("chat", uuid4().hex))
            return await self._policy.chat(messages, sampling, prompt_first=True)
        system = [{**messages[0], "role": "system"}, *messages[1:]]
        prompt_ids = self._policy.encode_chat(system) + self._forced_ids
        sampling = replace(sampling, max_tokens=self._max_reply_tokens(len(prompt_ids)))
        tokens_left = self._generation.max_tokens_in_conversation - len(prompt_ids)
        return await self._policy.sample(prompt_ids, sampling, tokens_left, self._opened_thought)

    def _max_reply_tokens(self, used: int) -> int:
        """Return the most tokens that a reply may have, if the chat has `used` tokens already."""
        limit = min(self._generation.max_tokens_in_conversation - used, self._generation.max_tokens_per_turn)
        if limit < 1:
            raise DataError(
                f"The chat has {used} tokens, and a conversation may have "
                f"{self._generation.max_tokens_in_conversation} (generation.max_tokens_in_conversation): begin anew."
            )
        return limit

    def _messages(self, request: ChatBody) -> list[Message]:
        """Return the chat as messages for the teacher, built as in a lesson."""
        opening = opening_turns(self._generation, request.problem, request.student_name)
        replies = [Turn(message.role, message.text) for message in request.turns[len(opening) :]]
        setup = Setup(self._conversation_type, request.student_name, ())
        conversation = Conversation(
            "chat", Problem.of(request.problem), setup, ClassroomRules(), turns=[*opening, *replies]
        )
        return chat_so_far(self._generation, conversation)
