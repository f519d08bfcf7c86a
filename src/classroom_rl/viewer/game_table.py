"""A game of Marooned that a person plays on the page together with the server's model. The page keeps the messages. The
server replays the game from them for each request, so it needs no state of its own."""

import asyncio
from dataclasses import replace
from uuid import uuid4

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.marooned.config import Generation
from classroom_rl.environments.marooned.prompts import render, system_prompt
from classroom_rl.environments.marooned.table import Table
from classroom_rl.errors import DataError, DeadlineExceeded
from classroom_rl.rollout.chat_template import encode_chat
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.environment import LoadedModels
from classroom_rl.viewer.schemas import GameBody, GameMoment


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

    @classmethod
    def of(cls, config: TrainRLConfig, roles: LoadedModels, longest_s: float) -> "GameTable":
        """Create the table for a server's configuration."""
        options, generation = config.teacher_model.vllm, config.generation
        sampling = Sampling.of(options, generation.max_tokens_per_turn)
        return cls(roles, generation, options.max_length, sampling, longest_s)

    @property
    def policy(self) -> str:
        return str(self._roles.policy.policy)

    @property
    def spent_usd(self) -> float | None:
        """As `LoadedModels.spent_usd`."""
        return self._roles.spent_usd

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
            policy=self.policy,
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
