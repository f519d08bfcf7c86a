"""Forks of played conversations at messages of the tutor, and the playouts that continue from them.

A fork is at a message that the student could still answer. It consists of the message and everything before it; what
came after it in the played conversation is not part of the fork.

Playouts go through the real classroom, with its states, prompts and limits, but are not judged or reviewed. They have
their own journal. Request ids are derived from what a playout continues, so an interrupted check repeats no playout.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from pydantic import TypeAdapter

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.conversation import ClassroomRules, Conversation
from classroom_rl.environments.classroom.environment import Classroom
from classroom_rl.environments.classroom.record import ConversationRecord, ReplayedState
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.environments.classroom.supervised_turn import target_of
from classroom_rl.rollout.engine import PolicyEngine
from classroom_rl.rollout.player import derive_seed
from classroom_rl.rollout.problem import Problem, material_of
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.scheduler import Schedule
from classroom_rl.rollout.store.journal import Journal, request_of
from classroom_rl.rollout.supervision import SampledDraft, settle
from classroom_rl.rollout.tokens import Turn

Event = Mapping[str, Any]
"""An event of the journal."""
_TURN = TypeAdapter(Turn)


@dataclass(frozen=True)
class Message:
    """A message of the tutor, and the journal event that adds it with its tokens to a conversation."""

    turn: Turn
    event: Event

    @classmethod
    def of(cls, event: Event) -> "Message":
        """The message of a `turn` event."""
        return cls(_TURN.validate_python(event["turn"]), event)


@dataclass(frozen=True)
class Fork:
    """A message of the tutor in a played conversation, and what came before it.

    Attributes:
        conversation: the id of the played conversation.
        copy: its number among the conversations on the same problem.
        before: the messages before the forked one, those of the prompt template included.
        events: the journal's events of the messages before it.
    """

    problem: Problem
    conversation: str
    copy: int
    before: tuple[Turn, ...]
    events: tuple[Event, ...]
    message: Message

    @property
    def position(self) -> int:
        """The position of the forked message in the conversation, from 0."""
        return len(self.before)


def forks_of(
    record: ConversationRecord, problem: Problem, copy: int, events: Sequence[Event], max_turns: int
) -> list[Fork]:
    """The forks of a played conversation, from the journal's events of it, in order. After `max_turns` messages the
    teacher ends the conversation: nothing follows its last one."""
    turn_events = [event for event in events if event["event"] == "turn"]
    opening = len(record.turns) - len(turn_events)  # messages of the prompt template, which have no events
    forks = []
    for number, event in enumerate(turn_events):
        position = opening + number
        if record.turns[position].role == "teacher" and position + 1 < max_turns:
            earlier_turns = tuple(record.turns[:position])
            forks.append(Fork(problem, record.id, copy, earlier_turns, tuple(turn_events[:number]), Message.of(event)))
    return forks


def all_forks(
    records: Sequence[ConversationRecord],
    problems: Sequence[Problem],
    events_of: Callable[[str], Sequence[Event]],
    max_turns: int,
    seed: int,
) -> list[Fork]:
    """All forks of played conversations in random order: first one of each conversation, then a second one of each,
    and so on, because forks of one conversation resemble each other. Failed conversations have no forks. `events_of`
    returns the journal's events of a conversation, by its id."""
    by_id = {problem.id: problem for problem in problems}
    rng = random.Random(f"{seed}|forks")
    copies: Counter[str] = Counter()
    conversations = []
    for record in records:
        copy = copies[record.problem_id]
        copies[record.problem_id] += 1
        if record.failure is None:
            forks = forks_of(record, by_id[record.problem_id], copy, events_of(record.id), max_turns)
            conversations.append(rng.sample(forks, len(forks)))
    rng.shuffle(conversations)
    return [fork for forks in zip_longest(*conversations) for fork in forks if fork is not None]


def corrected(fork: Fork, review: Review, teacher: PolicyEngine, has_tokens: bool) -> Message | None:
    """The supervisor's correction as a replacement of the forked message, with the tokens that supervised training
    would give it if the teacher works on tokens (`has_tokens`). None without a correction, or if the message is an
    unfinished thought, in which nothing was said."""
    if review.correction is None:
        return None
    event, target = fork.message.event, None
    sampled_count = len(event["logprobs"])
    ids, given_ids = tuple(event["ids"][:sampled_count]), tuple(event["ids"][sampled_count:])
    draft = SampledDraft(fork.message.turn, ids, tuple(event["logprobs"]), given_ids, mask=tuple(event.get("mask", ())))
    if has_tokens:
        target = target_of(draft, review.correction, teacher.tokenizer, teacher.frame.turn_end_id)
        if target is None:
            return None
    message = settle([draft], review, True, (fork.position, 0), lambda *_: target)
    turn = replace(message.turn, review=None, drafts=(), span=None)
    prompt_fields = {name: event[name] for name in ("prompt_ids", "prompt_estimate") if name in event}
    return Message(turn, {"event": "turn", "turn": turn, "ids": message.ids, "logprobs": (), **prompt_fields})


class ForkedClassroom(Classroom):
    """A classroom whose conversations begin with the messages of played ones.

    Attributes:
        beginnings: request id → the events of the messages that its conversations begin with.
        drawn_with: the seed and step with which the names and personas of the played conversations were drawn.
    """

    beginnings: dict[str, Sequence[Event]]
    drawn_with: dict[str, int]

    def open(self, id: str, problem: Problem, request: SampleRequest) -> Conversation:
        """A new conversation with the student of the played one."""
        return super().open(id, problem, request.model_copy(update=self.drawn_with))

    def replay(self, episode: Conversation, events: Iterable[dict[str, Any]], judge_again: bool) -> ReplayedState:
        """Replay a conversation up to the fork, and then the events that the journal has of the playout."""
        return super().replay(episode, [*self.beginnings[request_of(episode.id)], *events], judge_again)


class BranchPlayer:
    """Plays branches with the models, rules and seed of an evaluation. `journal` records the playouts."""

    def __init__(
        self,
        generation: GenerationConfig,
        rules: ClassroomRules,
        roles: Roles,
        schedule: Schedule,
        journal: Journal,
        seed: int,
    ):
        self._generation, self._roles, self._schedule = generation, roles, schedule
        self._rules = replace(rules, judge_rules=(), solutions=0, post_test="")
        self._journal, self._seed = journal, seed

    async def siblings(self, fork: Fork, count: int) -> list[Message]:
        """Sample `count` alternatives to the forked message from the tutor; fewer if its context is full."""
        request = self._request(fork, "siblings", count, [])
        rules = replace(self._rules, max_turns=fork.position + 1)
        records = await self._play(rules, request, fork.events)
        all_events = [self._journal.events(record.id) for record in records]
        turn_events = [[event for event in events if event["event"] == "turn"] for events in all_events]
        return [Message.of(events[0]) for events in turn_events if events]

    async def playouts(self, fork: Fork, message: Message, count: int) -> list[ConversationRecord]:
        """Play the conversation on, `count` times, from a message at the fork. Playout i uses the same seeds and
        personas in all branches of a fork, so branches can be compared in pairs."""
        request = self._request(fork, "playouts", count, [message.turn.text])
        return await self._play(self._rules, request, [*fork.events, message.event])

    def _request(self, fork: Fork, kind: str, count: int, new_texts: list[str]) -> SampleRequest:
        texts = [turn.text for turn in fork.before] + new_texts
        content = sha256(json.dumps([fork.problem.text, texts]).encode()).hexdigest()[:16]
        problems = [fork.problem] * count
        return SampleRequest(
            problems=[problem.text for problem in problems],
            answers=[problem.answer for problem in problems],
            post_test_material=material_of(problems),
            request_id=f"{kind}-{fork.problem.id}-{fork.copy}-{fork.position}-{content}",
            seed=derive_seed(self._seed, kind, fork.problem.id, fork.copy, fork.position),
            step=0,
            fixed_seeds=True,
        )

    async def _play(
        self, rules: ClassroomRules, request: SampleRequest, beginning: Sequence[Event]
    ) -> list[ConversationRecord]:
        classroom = ForkedClassroom(self._generation, self._roles, self._journal, {}, rules)
        classroom.beginnings = {request.request_id: beginning}
        classroom.drawn_with = {"seed": self._seed, "step": 0}
        runner = Runner(classroom, self._journal, {}, self._schedule)
        return (await runner.sample(request)).conversations
