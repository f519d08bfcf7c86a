"""Talking to the current teacher as a student: in the chat it is given what it is given in a lesson."""

import asyncio
from dataclasses import replace
from typing import Protocol

from config.base import GenerationConfig
from src.chat_template import encode_chat
from src.conversation import END_OF_CONVERSATION, visible_text
from src.errors import DataError, DeadlineExceeded
from src.schedule import ConversationType
from src.seats import Seats
from src.teacher_prompt import first_messages, forced_ids, opened_thought, opening_turns, system_message
from src.turns import Turn
from src.viewer.parts import split_thoughts
from src.viewer.wire import ChatOpening, ChatReply, ChatRequest, Said


class Tutor(Protocol):
    """Who can be talked to, and how the server is at the moment."""

    def opening(self, request: ChatRequest) -> ChatOpening: ...

    async def reply(self, request: ChatRequest) -> ChatReply: ...

    @property
    def policy(self) -> str: ...

    @property
    def judge_spent_usd(self) -> float | None: ...


class SeatedTutor:
    """The teacher of a running server.

    Args:
        longest_s: how long an answer may take, in seconds: whoever chats is a guest of a training, and new weights
            wait for answers in flight.
    """

    def __init__(self, seats: Seats, generation: GenerationConfig, longest_s: float):
        self._seats = seats
        self._generation = generation
        self._longest_s = longest_s
        self._forced_ids = forced_ids(generation, seats.teacher.frame, seats.teacher.tokenizer)
        self._opened_thought = opened_thought(generation, seats.teacher.frame)

    @property
    def policy(self) -> str:
        return str(self._seats.teacher.policy)

    @property
    def judge_spent_usd(self) -> float | None:
        return None if self._seats.judge_api is None else self._seats.judge_api.ledger.spent_usd

    @property
    def _kind(self) -> ConversationType:
        """Who opens the chat: as in the lessons, the teacher where both may."""
        forced = self._generation.forced_conversation_type
        return ConversationType.GUIDED if forced is None else ConversationType(forced.lower())

    def opening(self, request: ChatRequest) -> ChatOpening:
        """How a lesson on this problem begins."""
        opened = opening_turns(self._generation, request.problem, request.student_name)
        student_begins = bool(opened) or self._kind is ConversationType.ATTEMPTED
        return ChatOpening(
            system=system_message(self._generation, request.problem, request.student_name),
            turns=[Said(role=turn.role, text=turn.text) for turn in opened],
            next="student" if student_begins else "teacher",
        )

    async def reply(self, request: ChatRequest) -> ChatReply:
        """What the teacher says next.

        Raises:
            DataError: if the chat has no room left in the context.
            DeadlineExceeded: if it takes too long: the engine sleeps while a trainer uses its GPU, or is busy.
        """
        ids = self._prompt(request)
        room = min(self._generation.max_tokens_in_conversation - len(ids), self._generation.max_tokens_per_turn)
        if room < 1:
            raise DataError(
                f"The chat has {len(ids)} tokens, and a conversation may have "
                f"{self._generation.max_tokens_in_conversation} (generation.max_tokens_in_conversation): begin anew."
            )
        try:
            async with asyncio.timeout(self._longest_s):
                sampling = replace(self._seats.teacher_sampling, max_tokens=room)
                answer = await self._seats.teacher.generate(ids, sampling)
        except TimeoutError:
            raise DeadlineExceeded(
                f"The teacher did not answer within {self._longest_s:g} s: its engine is busy, or sleeps while the "
                "trainer uses the GPU. Try again during the next rollout."
            ) from None
        text = self._opened_thought + answer.text
        return ChatReply(
            text=text,
            parts=split_thoughts(text),
            tokens=len(answer.ids),
            ended=answer.ended,
            over=END_OF_CONVERSATION in visible_text(text),
            policy=str(answer.policy),
        )

    def _prompt(self, request: ChatRequest) -> list[int]:
        turns = [Turn(said.role, said.text) for said in request.turns]
        opened = opening_turns(self._generation, request.problem, request.student_name)
        first = next((i for i, turn in enumerate(turns) if turn.role == "teacher" and i >= len(opened)), len(turns))
        kind = self._kind
        messages = first_messages(self._generation, request.problem, request.student_name, kind, turns[:first])
        for turn in turns[first:]:
            role = "assistant" if turn.role == "teacher" else "user"
            messages.append({"role": role, "content": visible_text(turn.text)})
        return encode_chat(self._seats.teacher.tokenizer, messages) + self._forced_ids
