"""Marooned's route of the server: a game that a person plays on the page together with the server's model. The page
keeps the messages. The server replays the game from them for each request, so it needs no state of its own."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal
from uuid import uuid4

from fastapi import APIRouter
from pydantic import BaseModel, Field

from classroom_rl.environments.marooned.config import Generation
from classroom_rl.environments.marooned.prompts import render, system_prompt
from classroom_rl.environments.marooned.table import Table
from classroom_rl.errors import DataError, DeadlineExceeded
from classroom_rl.rollout.chat_template import encode_chat
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.environment import LoadedModels
from classroom_rl.rollout.extensions import OpenServer


class GameBody(BaseModel):
    """Body of `POST /api/game`.

    Attributes:
        problem: the game and the number of the model's player, such as `island 17, seat 3`.
        seat: the number of the person's player.
        said: the messages of model and person so far, in the order of play.
        action: what the person does now, if it is the person's turn.
    """

    problem: str = Field(min_length=1, max_length=200)
    seat: int = Field(ge=1, le=9)
    said: list[Annotated[str, Field(max_length=100_000)]] = Field(default_factory=list, max_length=20_000)
    action: str = Field("", max_length=2_000)


class GameMoment(BaseModel):
    """Response of `POST /api/game`.

    Attributes:
        said: the new messages of person and model.
        fault: why the person's action was refused, which costs no turn; empty if it was not.
        shown: what the person's sailor sees; the whole island once the game is over.
        possible: actions that the person can do.
        due: whose decision is next.
        role, rules: the role of the person's sailor and the rules as that role knows them.
        outcome: how the game ended; empty while it goes on.
    """

    said: list[str]
    fault: str
    shown: str
    possible: list[str]
    due: Literal["person", "model", "nobody"]
    role: str
    rules: str
    outcome: str
    policy: str


class GameTable:
    """A table at which a person plays with the model of a running server.

    Args:
        context: the context length of the model, in tokens.
        sampling: how its decisions are sampled.
        longest_s: how long a decision of the model may take, in seconds. It is limited because new weights from the
            trainer wait for replies in flight.
    """

    def __init__(self, roles: LoadedModels, generation: Generation, context: int, sampling: Sampling, longest_s: float):
        self._roles = roles
        self._generation = generation
        self._context = context
        self._sampling = sampling
        self._longest_s = longest_s

    async def play(self, request: GameBody) -> GameMoment:
        """Return the game after the person's action, if the request has one, and after the model's next decision, if
        that is due then.

        Raises:
            DataError: as in `Table.of`, or if the model's prompt does not fit into its context.
            DeadlineExceeded: if the model takes too long, because the engine is busy or sleeps while a trainer uses its
                GPU.
        """
        table = Table.of(request.problem, request.seat, self._generation, request.said)
        messages, fault = [], ""
        if request.action.strip():
            try:
                messages.append(table.read(request.action))
                table.say(messages[-1])
            except DataError as error:
                fault = str(error)
        if table.due == table.model:
            messages.append(await self._decision(table))
            table.say(messages[-1])
        return GameMoment(
            said=messages,
            fault=fault,
            shown=render(table.game, None if table.game.over else table.person),
            possible=table.possible,
            due={table.person: "person", table.model: "model"}.get(table.due, "nobody"),
            role=table.game.roles[table.person],
            rules=system_prompt(table.game.rules, table.game.roles[table.person]),
            outcome=table.game.outcome or "",
            policy=str(self._roles.policy.policy),
        )

    async def _decision(self, table: Table) -> str:
        policy = self._roles.policy
        prompt_ids = encode_chat(policy.tokenizer, table.prompt(self._generation.show_rules))
        context = min(self._context, self._generation.max_tokens_in_conversation)
        max_tokens = min(context - len(prompt_ids) - 1, self._generation.max_tokens_per_turn)
        if max_tokens < 1:
            raise DataError(
                f"The model's prompt has {len(prompt_ids)} tokens, and its context {context}: begin another game."
            )
        sampling = replace(self._sampling, max_tokens=max_tokens, draw=("game", uuid4().hex))
        try:
            async with asyncio.timeout(self._longest_s):
                return (await policy.generate(prompt_ids, sampling)).text
        except TimeoutError:
            raise DeadlineExceeded(
                f"The model did not decide within {self._longest_s:g} s: its engine is busy, or sleeps while the "
                "trainer uses the GPU. Try again during the next rollout."
            ) from None


def open_for(server: OpenServer) -> GameTable:
    """Open the table of a running server."""
    options, generation = server.config.teacher_model.vllm, server.config.generation
    sampling = Sampling.of(options, generation.max_tokens_per_turn)
    roles = server.episodes.environment.roles
    return GameTable(roles, generation, options.max_length, sampling, server.longest_reply_s)


def add_routes(router: APIRouter, opened: Callable[[], GameTable]) -> None:
    """Add the route of the page's game."""

    @router.post("/api/game")
    async def game(body: GameBody) -> GameMoment:
        return await opened().play(body)
