"""Has conversations judged by all rules and attempts: each by itself, or those of a group together.

A group is judged when the last of its conversations has ended. If the judge gives no verdict on the group, its
conversations are judged one by one, all of them: scores of a group and of single calls are never compared with each
other, nor are those of different calls.
"""

import asyncio
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from classroom_rl.config.base import JudgeModelConfig
from classroom_rl.config.values import GROUP, SCORING_RULES
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.record import ReplayedState
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.judges.verdicts import STOPS, Verdict, ask_for_verdict, failed_verdict, parse_group
from classroom_rl.rollout.environment import Play, Siblings
from classroom_rl.rollout.store.journal import Journal

logger = logging.getLogger(__name__)

ConversationPlay = Play[Conversation, ReplayedState]
GroupVerdicts = Mapping[str, list[Verdict]]
"""By conversation: the verdict of each attempt at a rule."""


@dataclass
class _Meeting:
    """The conversations of a group that wait to be judged.

    Attributes:
        plays: those that have arrived, by conversation.
        complete: set when no other can arrive any more.
        answers: by rule, the verdicts on the group, or None if its conversations are to be judged one by one.
    """

    plays: dict[str, ConversationPlay] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    answers: dict[str, asyncio.Future[GroupVerdicts | None]] = field(default_factory=dict)

    def answer(self, rule: str) -> "asyncio.Future[GroupVerdicts | None]":
        """Where the verdicts by a rule will be."""
        if rule not in self.answers:
            self.answers[rule] = asyncio.get_running_loop().create_future()
        return self.answers[rule]


class JudgePanel:
    """The judge of a classroom, asked by each rule as often as is configured.

    Args:
        rules: the rules' names.
        attempts: the number of attempts at each.
        options: whether groups are judged, and how many anchors there are.
    """

    def __init__(
        self, roles: Roles, journal: Journal, rules: Sequence[str], attempts: int, options: JudgeModelConfig
    ) -> None:
        self._roles, self._journal = roles, journal
        self._rules, self._attempts, self._options = rules, attempts, options

    @property
    def identity(self) -> tuple[object, ...]:
        """What verdicts depend on besides the rules; empty if each conversation is judged by itself."""
        if self._options.mode != GROUP:
            return ()
        return (GROUP, tuple(sorted(self._options.group_prompts_paths.items())))

    async def judge(self, play: ConversationPlay) -> list[Verdict]:
        """The verdicts on a conversation, failed attempts included, by rule and attempt; anchors come last. In groups
        this waits for the other conversations of its group."""
        meeting = await self._meet(play) if self._is_in_group(play) else None
        async with asyncio.TaskGroup() as panel:  # an error that stops one attempt cancels the others
            asked = [
                panel.create_task(self._by_rule(play, rule, meeting if rule in SCORING_RULES else None))
                for rule in self._rules
            ]
        verdicts = [verdict for each in asked for verdict in each.result()]
        return sorted(verdicts, key=lambda verdict: verdict.anchor)

    def left(self, play: ConversationPlay) -> None:
        """Note that a conversation failed, and so will not be judged with its group."""
        self._close(play.siblings)

    def _is_in_group(self, play: ConversationPlay) -> bool:
        """Whether a conversation is judged with its group: those of a training are, an evaluation's are not."""
        return self._options.mode == GROUP and play.request.wanted_policy is not None

    async def _by_rule(self, play: ConversationPlay, rule: str, meeting: _Meeting | None) -> list[Verdict]:
        verdicts = await self._in_group(meeting, play, rule) if meeting is not None else None
        if verdicts is None:
            size = None if meeting is None else 1
            return await self._alone(play, rule, range(self._attempts), size)
        if _draw(play.episode.id, rule, "anchor") < self._options.anchor_share:
            verdicts = verdicts + await self._alone(play, rule, [self._attempts], None, anchor=True)
        return verdicts

    # A group -----------------------------------------------------------------------------------------------------

    async def _meet(self, play: ConversationPlay) -> _Meeting:
        """Wait until all conversations of a group that will be judged are there."""
        siblings = play.siblings
        if siblings.meeting is None:
            siblings.meeting = _Meeting()
        siblings.meeting.plays[play.episode.id] = play
        self._close(siblings)
        await siblings.meeting.complete.wait()
        return siblings.meeting

    def _close(self, siblings: Siblings) -> None:
        meeting = siblings.meeting
        if meeting and all(each.id in meeting.plays or each.failure is not None for each in siblings.episodes):
            meeting.complete.set()

    async def _in_group(self, meeting: _Meeting, play: ConversationPlay, rule: str) -> list[Verdict] | None:
        """The verdicts on the group; None if its conversations are to be judged one by one."""
        answer = meeting.answer(rule)
        if play is next(iter(meeting.plays.values())):  # the first to arrive asks for all
            plays = list(meeting.plays.values())
            found = self._known(plays, rule) or await self._ask_about_group(plays, rule)
            for each in plays if found is not None else ():  # all at once, before any of them goes on
                self._write(each, found[each.episode.id])
            answer.set_result(found)
        verdicts = await asyncio.shield(answer)  # a conversation that is cancelled leaves it to the others
        return verdicts and verdicts[play.episode.id]

    def _known(self, plays: Sequence[ConversationPlay], rule: str) -> GroupVerdicts | None:
        """The verdicts on the group that the journal holds, if it holds all of them."""
        attempts = range(self._attempts)
        found = {play.episode.id: [play.replayed.verdicts.get((rule, i)) for i in attempts] for play in plays}
        given = [verdict for verdicts in found.values() for verdict in verdicts]
        return found if all(each is not None and _is_of_group(each) for each in given) else None

    async def _ask_about_group(self, plays: Sequence[ConversationPlay], rule: str) -> GroupVerdicts | None:
        """The verdicts on a group; None if no attempt brings any, or if conversations of it were judged alone."""
        said = {play.episode.id: json.dumps(play.episode.transcript()) for play in plays}
        different = set(said.values())  # equal conversations are shown once, and get one verdict
        alone = any(not _is_of_group(each) for play in plays for each in play.replayed.of_rule(rule))
        if alone or len(different) == 1:
            return None
        problem = plays[0].episode.problem.text
        async with asyncio.TaskGroup() as panel:
            asked = [
                panel.create_task(self._attempt_at_group(rule, attempt, different, problem))
                for attempt in range(self._attempts)
            ]
        answers = [each.result() for each in asked]
        if not any(verdict.valid for answer in answers for verdict in answer.values()):
            logger.warning("no verdict by the rule %s on a group: its conversations are judged one by one", rule)
            return None
        return {name: [answer[each] for answer in answers] for name, each in said.items()}

    async def _attempt_at_group(
        self, rule: str, attempt: int, transcripts: Collection[str], problem: str
    ) -> dict[str, Verdict]:
        """One call on a group: the verdict on each transcript, or on each the error of the call."""
        shown = sorted(transcripts, key=lambda each: _draw(each, rule, attempt))  # no place in the prompt is one's own
        text, size = "", len(shown)
        try:
            text = await self._roles.judge.judge_group(rule, [json.loads(each) for each in shown], problem, attempt)
            verdicts = parse_group(rule, attempt, text, size)
        except STOPS:
            raise
        except Exception as error:
            logger.warning("no verdict by the rule %s on a group: %s: %s", rule, type(error).__name__, error)
            failed = failed_verdict(rule, attempt, error, text or getattr(error, "answer", ""))
            verdicts = [replace(failed, refused=False, group_size=size)] * size
        return dict(zip(shown, verdicts, strict=True))

    def _write(self, play: ConversationPlay, verdicts: Sequence[Verdict]) -> None:
        """Write what the journal does not hold yet. A conversation that got another verdict before is rewarded anew."""
        for verdict in verdicts:
            known = play.replayed.verdicts.get((verdict.rule, verdict.attempt))
            if known != verdict:
                self._journal.append("verdict", conversation=play.episode.id, verdict=verdict)
                play.replayed.rewarded = play.replayed.finished = False

    # One conversation ----------------------------------------------------------------------------------------------

    async def _alone(
        self, play: ConversationPlay, rule: str, attempts: Sequence[int], size: int | None, anchor: bool = False
    ) -> list[Verdict]:
        """The verdicts of attempts at one conversation; those that the journal holds stay."""

        async def ask(attempt: int) -> Verdict:
            known = play.replayed.verdicts.get((rule, attempt))
            if known is not None and not _is_of_group(known):
                return known
            about = (play.episode.transcript(), play.episode.problem.text)
            verdict = await ask_for_verdict(self._roles.judge, rule, attempt, about, play.episode.facts)
            verdict = replace(verdict, group_size=size, anchor=anchor)
            self._write(play, [verdict])
            return verdict

        async with asyncio.TaskGroup() as panel:
            asked = [panel.create_task(ask(attempt)) for attempt in attempts]
        return [each.result() for each in asked]


def _is_of_group(verdict: Verdict) -> bool:
    """Whether a verdict, or its error, comes from a call on several conversations."""
    return verdict.group_size is not None and verdict.group_size > 1


def _draw(*parts: str | int) -> float:
    """A number in [0, 1) that depends on nothing but the parts."""
    return int.from_bytes(sha256("|".join(map(str, parts)).encode()).digest()[:8]) / 2**64
