"""Judging: asks the judge by every rule, as often as configured, about single conversations or about whole groups.

A group is judged when the last of its conversations has ended. If the judge gives no verdict on the group, all of its
conversations are judged one by one. Scores from different calls, or from group calls and single calls, are therefore
never compared within a group.
"""

import asyncio
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.rubric import load_rubric
from classroom_rl.config.values import GROUP, SCORING_RULES
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.record import ReplayedState
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.judges.verdicts import STOPS, Verdict, ask_for_verdict, failed_verdict, parse_group
from classroom_rl.rollout.environment import Group, Play
from classroom_rl.rollout.store.journal import Journal

logger = logging.getLogger(__name__)

ConversationPlay = Play[Conversation, ReplayedState]
GroupVerdicts = Mapping[str, list[Verdict]]
"""Conversation id → the verdict of each attempt at one rule."""


@dataclass
class _GroupBarrier:
    """Where the finished conversations of a group wait for each other before they are judged.

    Attributes:
        plays: the conversations that have arrived, by id.
        complete: set when no other conversation can arrive any more.
        futures: by rule, the verdicts on the group, or None if its conversations are to be judged one by one.
    """

    plays: dict[str, ConversationPlay] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    futures: dict[str, asyncio.Future[GroupVerdicts | None]] = field(default_factory=dict)

    def verdicts(self, rule: str) -> "asyncio.Future[GroupVerdicts | None]":
        """The future of the verdicts by a rule, created on first use."""
        if rule not in self.futures:
            self.futures[rule] = asyncio.get_running_loop().create_future()
        return self.futures[rule]


class JudgePanel:
    """Asks the classroom's judge for verdicts by each rule, with this number of attempts. The options say whether
    groups are judged, and the share of anchors."""

    def __init__(
        self, roles: Roles, journal: Journal, rules: Sequence[str], attempts: int, options: JudgeModelConfig
    ) -> None:
        self._roles, self._journal = roles, journal
        self._rules, self._attempts, self._options = rules, attempts, options
        self._rubric = None if options.rubric is None else load_rubric(options.rubric)

    @property
    def identity(self) -> tuple[object, ...]:
        """What the verdicts depend on besides the rules; empty if conversations are judged one by one by the
        built-in criteria."""
        if self._rubric is not None:
            return (self._rubric, self._options.rubric_prompt_path)
        if self._options.mode != GROUP:
            return ()
        return (GROUP, tuple(sorted(self._options.group_prompts_paths.items())))

    async def judge(self, play: ConversationPlay) -> list[Verdict]:
        """The verdicts on a conversation, failed attempts included, by rule and attempt; anchors come last. In group
        mode, this waits for the other conversations of the group."""
        barrier = await self._wait_for_group(play) if self._is_in_group(play) else None
        async with asyncio.TaskGroup() as task_group:  # an error that stops one attempt cancels the others
            tasks = [
                task_group.create_task(self._by_rule(play, rule, barrier if rule in SCORING_RULES else None))
                for rule in self._rules
            ]
        verdicts = [verdict for task in tasks for verdict in task.result()]
        return sorted(verdicts, key=lambda verdict: verdict.anchor)

    def left(self, play: ConversationPlay) -> None:
        """Note that a conversation failed: its group no longer waits for it."""
        self._release_if_complete(play.group)

    def _is_in_group(self, play: ConversationPlay) -> bool:
        """Whether a conversation is judged with its group: in training it is, in an evaluation it is not."""
        return self._options.mode == GROUP and play.request.wanted_policy is not None

    async def _by_rule(self, play: ConversationPlay, rule: str, barrier: _GroupBarrier | None) -> list[Verdict]:
        verdicts = await self._in_group(barrier, play, rule) if barrier is not None else None
        if verdicts is None:
            size = None if barrier is None else 1
            return await self._alone(play, rule, range(self._attempts), size)
        # An anchor judges the conversation once more by itself, to measure the group calls; it is not rewarded.
        if _draw(play.episode.id, rule, "anchor") < self._options.anchor_share:
            verdicts = verdicts + await self._alone(play, rule, [self._attempts], None, anchor=True)
        return verdicts

    # A group -----------------------------------------------------------------------------------------------------

    async def _wait_for_group(self, play: ConversationPlay) -> _GroupBarrier:
        """Wait until all conversations of the group have arrived or failed."""
        group = play.group
        if group.meeting is None:
            group.meeting = _GroupBarrier()
        group.meeting.plays[play.episode.id] = play
        self._release_if_complete(group)
        await group.meeting.complete.wait()
        return group.meeting

    def _release_if_complete(self, group: Group) -> None:
        barrier = group.meeting
        if barrier and all(episode.id in barrier.plays or episode.failure is not None for episode in group.episodes):
            barrier.complete.set()

    async def _in_group(self, barrier: _GroupBarrier, play: ConversationPlay, rule: str) -> list[Verdict] | None:
        """A conversation's verdicts from the calls on its group; None if it is to be judged by itself."""
        future = barrier.verdicts(rule)
        if play is next(iter(barrier.plays.values())):  # the first to arrive asks for the whole group
            plays = list(barrier.plays.values())
            group_verdicts = self._journaled(plays, rule) or await self._ask_about_group(plays, rule)
            # Write the verdicts on the whole group before any of its conversations goes on.
            for member_play in plays if group_verdicts is not None else ():
                self._write(member_play, group_verdicts[member_play.episode.id])
            future.set_result(group_verdicts)
        # Without the shield, cancelling one conversation would cancel the future that the others wait for.
        verdicts = await asyncio.shield(future)
        return verdicts and verdicts[play.episode.id]

    def _journaled(self, plays: Sequence[ConversationPlay], rule: str) -> GroupVerdicts | None:
        """The verdicts on the group from the journal; None if it lacks any of them."""
        attempts = range(self._attempts)
        by_conversation = {
            play.episode.id: [play.replayed.verdicts.get((rule, attempt)) for attempt in attempts] for play in plays
        }
        verdicts = [verdict for verdicts in by_conversation.values() for verdict in verdicts]
        is_complete = all(verdict is not None and _is_of_group(verdict) for verdict in verdicts)
        return by_conversation if is_complete else None

    async def _ask_about_group(self, plays: Sequence[ConversationPlay], rule: str) -> GroupVerdicts | None:
        """The verdicts on a group; None if no attempt gives any, or if some of its conversations were judged alone."""
        transcripts = {play.episode.id: json.dumps(play.episode.transcript()) for play in plays}
        distinct = set(transcripts.values())  # equal conversations are shown once and share a verdict
        judged_alone = any(not _is_of_group(verdict) for play in plays for verdict in play.replayed.of_rule(rule))
        if judged_alone or len(distinct) == 1:
            return None
        problem = plays[0].episode.problem.text
        async with asyncio.TaskGroup() as task_group:
            tasks = [
                task_group.create_task(self._attempt_at_group(rule, attempt, distinct, problem))
                for attempt in range(self._attempts)
            ]
        results = [task.result() for task in tasks]
        if not any(verdict.valid for verdicts in results for verdict in verdicts.values()):
            logger.warning("no verdict by the rule %s on a group: its conversations are judged one by one", rule)
            return None
        return {
            conversation_id: [verdicts[transcript] for verdicts in results]
            for conversation_id, transcript in transcripts.items()
        }

    async def _attempt_at_group(
        self, rule: str, attempt: int, transcripts: Collection[str], problem: str
    ) -> dict[str, Verdict]:
        """One call on a group: the verdict on each transcript. If the call failed, each gets its error."""
        # Each attempt has another order, so that no conversation profits from its position in the prompt.
        ordered = sorted(transcripts, key=lambda transcript: _draw(transcript, rule, attempt))
        text, size = "", len(ordered)
        try:
            conversations = [json.loads(transcript) for transcript in ordered]
            text = await self._roles.judge.judge_group(rule, conversations, problem, attempt)
            verdicts = parse_group(rule, attempt, text, size)
        except STOPS:
            raise
        except Exception as error:
            logger.warning("no verdict by the rule %s on a group: %s: %s", rule, type(error).__name__, error)
            failed = failed_verdict(rule, attempt, error, text or getattr(error, "answer", ""))
            verdicts = [replace(failed, refused=False, group_size=size)] * size
        return dict(zip(ordered, verdicts, strict=True))

    def _write(self, play: ConversationPlay, verdicts: Sequence[Verdict]) -> None:
        """Write the verdicts that the journal does not hold yet. They invalidate the conversation's earlier rewards."""
        for verdict in verdicts:
            journaled = play.replayed.verdicts.get((verdict.rule, verdict.attempt))
            if journaled != verdict:
                self._journal.append("verdict", conversation=play.episode.id, verdict=verdict)
                play.replayed.rewarded = play.replayed.finished = False

    # One conversation ----------------------------------------------------------------------------------------------

    async def _alone(
        self, play: ConversationPlay, rule: str, attempts: Sequence[int], size: int | None, anchor: bool = False
    ) -> list[Verdict]:
        """The verdicts of attempts at a single conversation; those in the journal are kept."""

        async def ask(attempt: int) -> Verdict:
            journaled = play.replayed.verdicts.get((rule, attempt))
            if journaled is not None and not _is_of_group(journaled):
                return journaled
            transcript_and_problem = (play.episode.transcript(), play.episode.problem.text)
            verdict = await ask_for_verdict(
                self._roles.judge, rule, attempt, transcript_and_problem, play.episode.facts
            )
            verdict = replace(verdict, group_size=size, anchor=anchor)
            self._write(play, [verdict])
            return verdict

        async with asyncio.TaskGroup() as task_group:
            tasks = [task_group.create_task(ask(attempt)) for attempt in attempts]
        return [task.result() for task in tasks]


def _is_of_group(verdict: Verdict) -> bool:
    """Whether a verdict, or its error, comes from a call on several conversations."""
    return verdict.group_size is not None and verdict.group_size > 1


def _draw(*parts: str | int) -> float:
    """A pseudo-random number in [0, 1) that depends only on the parts."""
    return int.from_bytes(sha256("|".join(map(str, parts)).encode()).digest()[:8]) / 2**64
