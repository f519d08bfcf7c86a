"""Has conversations judged by all rules and attempts: each by itself, or those of a group together.

A group is judged when the last of its conversations has ended. If the judge gives no verdict on the group, its
conversations are judged one by one, all of them: scores of a group and of single calls are never compared with each
other.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from weakref import WeakKeyDictionary

from config.base import JudgeModelConfig
from config.values import GROUP, SCORING_RULES
from src.classroom.conversation import Conversation
from src.classroom.group_verdicts import parse_group
from src.classroom.replay import ReplayedState
from src.classroom.seats import Seats
from src.classroom.verdicts import STOPS, Verdict, ask_for_verdict
from src.rollout.environment import Play, Siblings
from src.rollout.journal import Journal

logger = logging.getLogger(__name__)

ConversationPlay = Play[Conversation, ReplayedState]


@dataclass
class _Meeting:
    """The conversations of a group that wait to be judged.

    Attributes:
        plays: those that have arrived, by conversation.
        complete: set when no other can arrive any more.
        answers: by rule and attempt, the verdicts by conversation, or None if there are none on the group.
    """

    plays: dict[str, ConversationPlay] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    answers: dict[tuple[str, int], asyncio.Future[dict[str, Verdict] | None]] = field(default_factory=dict)

    def answer(self, rule: str, attempt: int) -> "asyncio.Future[dict[str, Verdict] | None]":
        """Where the verdicts of an attempt will be."""
        return self.answers.setdefault((rule, attempt), asyncio.get_running_loop().create_future())


class JudgePanel:
    """The judge of a classroom, asked by each rule as often as is configured.

    Args:
        rules: the rules' names.
        attempts: the number of attempts at each.
        options: whether groups are judged, and how many anchors there are.
    """

    def __init__(
        self, seats: Seats, journal: Journal, rules: Sequence[str], attempts: int, options: JudgeModelConfig
    ) -> None:
        self._seats, self._journal = seats, journal
        self._rules, self._attempts = rules, attempts
        self._in_groups = options.mode == GROUP
        self._anchor_share = options.anchor_share
        self._meetings: WeakKeyDictionary[Siblings, _Meeting] = WeakKeyDictionary()

    @property
    def identity(self) -> tuple[object, ...]:
        """What verdicts depend on besides the rules; empty if each conversation is judged by itself."""
        return (GROUP, self._anchor_share) if self._in_groups else ()

    async def judge(self, play: ConversationPlay) -> list[Verdict]:
        """The verdicts on a conversation, failed attempts included, by rule and attempt; anchors come last. In groups
        this waits for the other conversations of its group."""
        meeting = await self._meet(play) if self._in_groups else None
        asked: list[asyncio.Task[Verdict]] = []
        async with asyncio.TaskGroup() as panel:  # an error that stops one attempt cancels the others
            for rule in self._rules:
                together = meeting if rule in SCORING_RULES else None
                asked += [panel.create_task(self._attempt(play, rule, i, together)) for i in range(self._attempts)]
            for rule in self._rules:
                if meeting is not None and rule in SCORING_RULES and self._is_anchor(play.episode, rule):
                    asked.append(panel.create_task(self._attempt(play, rule, self._attempts, None, anchor=True)))
        return [each.result() for each in asked]

    def left(self, play: ConversationPlay) -> None:
        """Note that a conversation failed, and so will not be judged with its group."""
        if self._in_groups:
            self._close(play.siblings)

    # A group -----------------------------------------------------------------------------------------------------

    async def _meet(self, play: ConversationPlay) -> _Meeting:
        """Wait until all conversations of a group that will be judged are there."""
        meeting = self._meetings.setdefault(play.siblings, _Meeting())
        meeting.plays[play.episode.id] = play
        self._close(play.siblings)
        await meeting.complete.wait()
        return meeting

    def _close(self, siblings: Siblings) -> None:
        meeting = self._meetings.get(siblings)
        if meeting and all(each.id in meeting.plays or each.failure is not None for each in siblings.episodes):
            meeting.complete.set()

    async def _verdict_in_group(
        self, meeting: _Meeting, play: ConversationPlay, rule: str, attempt: int
    ) -> Verdict | None:
        """The verdict from the attempt at the whole group; None if its conversations are to be judged one by one."""
        answer = meeting.answer(rule, attempt)
        if play is next(iter(meeting.plays.values())):  # the first to arrive asks for all
            answer.set_result(await self._ask_about_group(meeting, rule, attempt))
        verdicts = await asyncio.shield(answer)  # a conversation that is cancelled leaves it to the others
        return verdicts and verdicts[play.episode.id]

    async def _ask_about_group(self, meeting: _Meeting, rule: str, attempt: int) -> dict[str, Verdict] | None:
        """The verdicts on a group by conversation; None if its conversations are to be judged one by one."""
        plays = list(meeting.plays.values())
        known = [play.replayed.verdicts.get((rule, attempt)) for play in plays]
        if any(verdict is not None and verdict.group_size is None for verdict in known):
            return None
        if None not in known:
            return {play.episode.id: verdict for play, verdict in zip(plays, known, strict=True)}
        said = {play.episode.id: json.dumps(play.episode.transcript()) for play in plays}
        # Equal conversations are shown once, and get one verdict. No place in the prompt is anybody's own.
        shown = sorted(set(said.values()), key=lambda each: _draw(each, rule, attempt))
        if len(shown) == 1:
            return None
        transcripts = [json.loads(each) for each in shown]
        try:
            text = await self._seats.judge.judge_group(rule, transcripts, plays[0].episode.problem.text, attempt)
            verdicts = dict(zip(shown, parse_group(rule, attempt, text, len(shown)), strict=True))
        except STOPS:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            logger.warning("no verdict by the rule %s on a group; it is judged one by one: %s", rule, what)
            return None
        return {name: verdicts[each] for name, each in said.items()}

    def _is_anchor(self, conversation: Conversation, rule: str) -> bool:
        return _draw(conversation.id, rule, "anchor") < self._anchor_share

    # One attempt -------------------------------------------------------------------------------------------------

    async def _attempt(
        self, play: ConversationPlay, rule: str, attempt: int, meeting: _Meeting | None, anchor: bool = False
    ) -> Verdict:
        """The verdict of one attempt. One that the journal holds stays; another is written into it."""
        verdict = None
        if meeting is not None:  # also with a verdict in the journal: others of the group may need theirs
            verdict = await self._verdict_in_group(meeting, play, rule, attempt)
        if known := play.replayed.verdicts.get((rule, attempt)):
            return known
        conversation = play.episode
        if verdict is None:
            about = (conversation.transcript(), conversation.problem.text)
            verdict = await ask_for_verdict(self._seats.judge, rule, attempt, about, conversation.facts)
        verdict = replace(verdict, anchor=anchor)
        self._journal.append("verdict", conversation=conversation.id, verdict=verdict)
        return verdict


def _draw(*parts: str | int) -> float:
    """A number in [0, 1) that depends on nothing but the parts."""
    return int.from_bytes(sha256("|".join(map(str, parts)).encode()).digest()[:8]) / 2**64
