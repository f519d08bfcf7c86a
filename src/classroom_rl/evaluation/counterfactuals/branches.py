"""Plays conversations on from a fork: other messages that the tutor samples there, and whole playouts of a branch.

Conversations go through the real classroom, with its states, prompts and limits, but nobody judges or reviews them.
Everything is in a journal of its own. Requests are named by what they continue, so a check that was interrupted repeats
no playout.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.classroom import Classroom
from classroom_rl.environments.classroom.conversation import ClassroomRules, Conversation
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.replay import ReplayedState
from classroom_rl.environments.classroom.roles import Seats
from classroom_rl.evaluation.counterfactuals.forks import Event, Fork, Message
from classroom_rl.rollout.problem import Problem, material_of
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.scheduler import Schedule
from classroom_rl.rollout.starts import derive_seed
from classroom_rl.rollout.store.journal import Journal, request_of


class ForkedClassroom(Classroom):
    """A classroom whose conversations begin with the messages of played ones.

    Attributes:
        beginnings: by request, the events of the messages that its conversations begin with.
        drawn_with: the seed and step with which the names and personas of the played conversations were drawn.
    """

    beginnings: dict[str, Sequence[Event]]
    drawn_with: dict[str, int]

    def open(self, id: str, problem: Problem, request: SampleRequest) -> Conversation:
        """A new conversation with the student of the played one."""
        return super().open(id, problem, request.model_copy(update=self.drawn_with))

    def replay(self, episode: Conversation, events: Iterable[dict[str, Any]], judge_again: bool) -> ReplayedState:
        """Bring a conversation to the fork, and then to the point where the journal ends."""
        return super().replay(episode, [*self.beginnings[request_of(episode.id)], *events], judge_again)


class BranchPlayer:
    """Plays branches with the models of an evaluation.

    Args:
        generation, rules: those of the played conversations.
        schedule: says when conversations may go on.
        journal: where the playouts are written down.
        seed: the seed of the evaluation.
    """

    def __init__(
        self,
        generation: GenerationConfig,
        rules: ClassroomRules,
        seats: Seats,
        schedule: Schedule,
        journal: Journal,
        seed: int,
    ):
        self._generation, self._seats, self._schedule = generation, seats, schedule
        self._rules = replace(rules, judge_rules=(), solutions=0, post_test="")
        self._journal, self._seed = journal, seed

    async def siblings(self, fork: Fork, count: int) -> list[Message]:
        """Messages that the tutor samples in place of the forked one; fewer if its context is full."""
        request = self._request(fork, "siblings", count, [])
        rules = replace(self._rules, max_turns=fork.place + 1)
        records = await self._play(rules, request, fork.events)
        spoken = [[each for each in self._journal.events(record.id) if each["event"] == "turn"] for record in records]
        return [Message.of(events[0]) for events in spoken if events]

    async def playouts(self, fork: Fork, message: Message, count: int) -> list[ConversationRecord]:
        """The conversation played on from a message at the fork. Playout i of every branch of a fork samples with the
        same seeds, and meets the same personas."""
        request = self._request(fork, "playouts", count, [message.turn.text])
        return await self._play(self._rules, request, [*fork.events, message.event])

    def _request(self, fork: Fork, kind: str, count: int, said: list[str]) -> SampleRequest:
        texts = [turn.text for turn in fork.before] + said
        content = sha256(json.dumps([fork.problem.text, texts]).encode()).hexdigest()[:16]
        problems = [fork.problem] * count
        return SampleRequest(
            problems=[each.text for each in problems],
            answers=[each.answer for each in problems],
            post_test_material=material_of(problems),
            request_id=f"{kind}-{fork.problem.id}-{fork.copy}-{fork.place}-{content}",
            seed=derive_seed(self._seed, kind, fork.problem.id, fork.copy, fork.place),
            step=0,
            fixed_seeds=True,
        )

    async def _play(
        self, rules: ClassroomRules, request: SampleRequest, beginning: Sequence[Event]
    ) -> list[ConversationRecord]:
        classroom = ForkedClassroom(self._generation, self._seats, self._journal, {}, rules)
        classroom.beginnings = {request.request_id: beginning}
        classroom.drawn_with = {"seed": self._seed, "step": 0}
        runner = Runner(classroom, self._journal, {}, self._schedule)
        return (await runner.sample(request)).conversations
