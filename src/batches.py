"""Requests by their id: each piece of work runs once, however often and over however many connections it is asked for.

Finished conversations stay in memory for the reward routes, up to a bound; the journal holds all of them.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from src.api import ConversationRecord, SampleRequest, SampleResponse
from src.classroom import Classroom, classroom_rules
from src.conversation import Conversation
from src.errors import RequestConflict, UnknownConversation
from src.journal import Journal
from src.seats import open_seats

if TYPE_CHECKING:
    from config.eval_model import EvalConfig
    from config.train_rl_model import TrainRLConfig


@dataclass
class _Batch:
    request: SampleRequest
    task: "asyncio.Task[SampleResponse]"


class BatchDesk:
    """Takes sample requests to the classroom and keeps what came of them.

    Args:
        keep: how many finished conversations stay in memory; whole batches are dropped, the oldest first.
    """

    def __init__(self, classroom: Classroom, journal: Journal, keep: int = 4096):
        self._classroom = classroom
        self._journal = journal
        self._keep = keep
        self._batches: OrderedDict[str, _Batch] = OrderedDict()
        self._conversations: dict[str, Conversation] = {}
        self._positions: dict[str, int] = {}

    @property
    def classroom(self) -> Classroom:
        """Where the conversations take place."""
        return self._classroom

    async def sample(self, request: SampleRequest) -> SampleResponse:
        """The answer to a request, run now unless it ran or runs already.

        Raises:
            RequestConflict: if the id was used with another body.
            ClassroomError: whatever the classroom raised; the id may then be used again.
        """
        batch = self._batches.get(request.request_id)
        if batch is None:
            batch = self._batches[request.request_id] = _Batch(request, asyncio.create_task(self._run(request)))
        elif batch.request != request:
            raise RequestConflict(f"Request id {request.request_id} was used with another body: choose a new id.")
        return await asyncio.shield(batch.task)

    async def wait(self, request_id: str) -> SampleResponse:
        """The answer to a request that was made before.

        Raises:
            UnknownConversation: if there was none with this id, or it failed or was dropped since.
        """
        batch = self._batches.get(request_id)
        if batch is None:
            raise UnknownConversation(f"No request {request_id} runs here: send it with POST /sample_conversations.")
        return await asyncio.shield(batch.task)

    def conversation(self, conversation_id: str) -> Conversation:
        """A finished conversation that is still in memory."""
        if conversation_id not in self._conversations:
            raise UnknownConversation(
                f"There is no finished conversation {conversation_id} in memory. Ids come from /sample_conversations "
                f"of this server; the last {self._keep} conversations are kept."
            )
        return self._conversations[conversation_id]

    def record(self, conversation_id: str) -> ConversationRecord:
        """The record of any conversation that finished on this server, from the journal."""
        if conversation_id not in self._positions:
            raise UnknownConversation(f"There is no finished conversation {conversation_id}.")
        return ConversationRecord.model_validate(self._journal.read_at(self._positions[conversation_id])["record"])

    @property
    def running(self) -> list[str]:
        """Ids of the requests that are being worked on."""
        return [name for name, batch in self._batches.items() if not batch.task.done()]

    @property
    def finished(self) -> int:
        """How many conversations finished on this server."""
        return len(self._positions)

    async def _run(self, request: SampleRequest) -> SampleResponse:
        try:
            response = await self._classroom.sample(request, self._finished)
        except BaseException:
            del self._batches[request.request_id]
            raise
        self._drop_oldest()
        return response

    def _finished(self, conversation: Conversation, record: ConversationRecord) -> None:
        self._positions[record.id] = self._journal.append("conversation", record=record)
        self._conversations[record.id] = conversation

    def _drop_oldest(self) -> None:
        for name, batch in list(self._batches.items())[:-1]:
            if len(self._conversations) <= self._keep:
                return
            if batch.task.done():
                for record in batch.task.result().conversations:
                    self._conversations.pop(record.id, None)
                del self._batches[name]


async def open_desk(
    models: "TrainRLConfig | EvalConfig", reward_weights: dict[str, float], graded: bool, run_folder: Path
) -> BatchDesk:
    """Load the models of a configuration and open a classroom with them, its journal in `run_folder`.

    Raises:
        EngineFailure: if a model cannot be loaded.
    """
    generation = models.generation
    rules = classroom_rules(generation, reward_weights, models.teacher_model.vllm.max_length, graded)
    seats = await open_seats(models.teacher_model, models.student_model, models.judge_model, generation, models.seed)
    journal = Journal(run_folder)
    return BatchDesk(Classroom(generation, seats, journal, reward_weights, rules), journal)
