"""The server's part of checking whether the teacher fools the judge: a held-out judge scores conversations again, and
the training judge scores planted conversations (canaries). The results change no reward.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import cast

from pydantic import BaseModel, Field

from classroom_rl.config.values import LARGEST_BATCH
from classroom_rl.engines.api.chat_api import ChatApi
from classroom_rl.environments.classroom.canaries import CANARIES, canaries
from classroom_rl.environments.classroom.conversation import Conversation, State
from classroom_rl.environments.classroom.environment import Classroom
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError
from classroom_rl.judges.verdicts import Verdict, ask_for_verdict, sum_up
from classroom_rl.rollout.engine import BATCH, Judge, Usage
from classroom_rl.rollout.extensions import OpenServer, PlayedEpisodes
from classroom_rl.rollout.requests import StrictModel

HELD_OUT_CALLS_NAME = "held_out_judge_calls.sqlite"
_CHECKS_KEPT = 8


class JudgeCheckRequest(StrictModel):
    """Body of `POST /check_judge`: finished conversations for the held-out judge. With `canaries`, the training judge
    also scores planted conversations on the problem of the first one.

    `request_id` makes the request idempotent: sent again, it returns the same response.
    """

    request_id: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._-]+$")
    step: int
    conversations: list[str] = Field(min_length=1, max_length=LARGEST_BATCH)
    canaries: bool = True


class SecondOpinion(BaseModel):
    """A conversation's scores by the training judge and by the held-out judge, in [0, 1]; null without a verdict.
    `verdicts` are those of the held-out judge."""

    conversation: str
    problem_id: str
    training: float | None
    held_out: float | None
    verdicts: list[Verdict]


class CanaryVerdict(BaseModel):
    """A planted conversation's score by the training judge, in [0, 1]; null without a verdict."""

    canary: str
    problem_id: str
    score: float | None
    verdicts: list[Verdict]


class JudgeCheckResponse(BaseModel):
    """Response of `POST /check_judge`. `second_opinions` is empty without a held-out judge. `held_out` is the usage of
    the held-out judge's API, if it is behind one."""

    request_id: str
    second_opinions: list[SecondOpinion]
    canaries: list[CanaryVerdict]
    held_out: Usage | None = None


class JudgeCheck:
    """Runs checks, each once per id, and writes their results to the journal.

    Args:
        service: holds the played conversations and the training judge.
        api: the held-out judge's client, if it is behind an API.
        timeout_s: how long judging one conversation may take, in seconds.
    """

    def __init__(self, service: PlayedEpisodes, held_out: Judge | None, api: ChatApi | None, timeout_s: float):
        self._service = service
        self._held_out = held_out
        self._api = api
        self._timeout_s = timeout_s
        self._checks: OrderedDict[str, tuple[dict, asyncio.Task[JudgeCheckResponse]]] = OrderedDict()

    async def run(self, request: JudgeCheckRequest) -> JudgeCheckResponse:
        """Have the held-out judge score the conversations, and the training judge the canaries, which are made from the
        first conversation.

        If a judge fails, for any reason, its verdict holds the error. A request with a known id returns the result of
        the earlier check, unless the conversations were played again with other weights since.

        Raises:
            UnknownConversation: if a conversation did not finish on this server.
            ConfigError: if this server has no judge.
        """
        weights = self._service.played_with(request.conversations)
        played_with, task = self._checks.get(request.request_id, (None, None))
        if task is None or played_with != weights:
            task = asyncio.create_task(self._run(request))
            self._checks[request.request_id] = weights, task
            while len(self._checks) > _CHECKS_KEPT:
                self._checks.popitem(last=False)
        return await asyncio.shield(task)

    @property
    def _classroom(self) -> Classroom:
        return cast(Classroom, self._service.environment)

    def _conversation(self, conversation_id: str) -> Conversation:
        record = cast(ConversationRecord, self._service.record(conversation_id))
        return record.conversation(self._classroom.rules)

    async def _run(self, request: JudgeCheckRequest) -> JudgeCheckResponse:
        training_judge = self._classroom.roles.judge
        if training_judge is None:
            raise ConfigError("There is no judge to check: the server runs without judge rules.")
        BATCH.set(request.request_id)  # so that the ledger counts these costs apart from those of the batch
        conversations = [self._conversation(conversation_id) for conversation_id in request.conversations]
        opinions = []
        if self._held_out is not None:
            opinions = [self._second_opinion(self._held_out, conversation) for conversation in conversations]
        canary_verdicts = self._canaries(training_judge, conversations[0], CANARIES if request.canaries else ())
        results = await asyncio.gather(asyncio.gather(*opinions), canary_verdicts)
        response = JudgeCheckResponse(
            request_id=request.request_id,
            second_opinions=results[0],
            canaries=results[1],
            held_out=self._api.ledger.usage(request.request_id) if self._api is not None else None,
        )
        self._service.journal.append("judge_check", request=request.request_id, step=request.step, found=response)
        return response

    async def _second_opinion(self, judge: Judge, conversation: Conversation) -> SecondOpinion:
        verdicts = await self._judge(judge, conversation, conversation.transcript())
        return SecondOpinion(
            conversation=conversation.id,
            problem_id=conversation.problem.id,
            training=conversation.judgement.score if conversation.judgement is not None else None,
            held_out=self._score(verdicts),
            verdicts=verdicts,
        )

    async def _canaries(self, judge: Judge, conversation: Conversation, names: Iterable[str]) -> list[CanaryVerdict]:
        with self._service.runner.schedule.register(1) as registration:
            await registration.wait_for_phase(State.JUDGE_TURN)  # only in this phase is the engine of a judge awake
            return await asyncio.gather(*(self._canary(judge, name, conversation) for name in names))

    async def _canary(self, judge: Judge, name: str, conversation: Conversation) -> CanaryVerdict:
        rubric = getattr(judge, "rubric", None)  # embedded judges have none
        canary = (CANARIES if rubric is None else canaries({entry.key: entry.best for entry in rubric}))[name]
        planted_messages = canary.plant(conversation.transcript(), conversation.problem)
        verdicts = await self._judge(judge, conversation, planted_messages)
        return CanaryVerdict(
            canary=name, problem_id=conversation.problem.id, score=self._score(verdicts), verdicts=verdicts
        )

    async def _judge(self, judge: Judge, conversation: Conversation, messages: list[dict[str, str]]) -> list[Verdict]:
        """Return one verdict per rule, each from a single attempt."""
        rules = self._classroom.rules.judge_rules
        dialogue = (messages, conversation.problem.text)
        attempts = (
            ask_for_verdict(judge, rule, 0, dialogue, conversation.facts, stops=(), timeout_s=self._timeout_s)
            for rule in rules
        )
        return await asyncio.gather(*attempts)  # with `stops` empty, a failed attempt is a verdict and raises nothing

    def _score(self, verdicts: list[Verdict]) -> float | None:
        judgement = sum_up(verdicts, self._classroom.rules.judge_rules)
        return None if judgement is None else judgement.score


def open_judge_check(server: OpenServer) -> JudgeCheck:
    """Create the judge check of a server, with the held-out judge if one is configured.

    Raises:
        ConfigError: if the held-out judge's API key is missing.
        StorageError: if the ledger of paid requests in the server's folder cannot be used.
    """
    guards = server.config.guards
    judge, api = guards.held_out_judge_model, None
    if judge is not None:
        judge, api = server.open_judge(judge, server.folder / HELD_OUT_CALLS_NAME, "held-out judge")
    if api is not None:
        server.closing.callback(api.ledger.close)
    return JudgeCheck(server.episodes, judge, api, guards.judge_check_timeout_s)
