"""The price of a single message, given only what came before it, and the outcome that the price is compared with.

The outcome is computed by the ledger of the post-test (docs/trusting_rewards.md) from the student's own later messages,
never by the judge or the supervisor that set the price. A `LaterOutcome` is created from the messages before the fork
and gets those after the forked one: it never sees the forked message itself.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.evaluation.counterfactuals.forks import Fork
from classroom_rl.judges.verdicts import CRITERIA, ask_for_verdict, sum_up
from classroom_rl.rollout.engine import NO_FACTS, ConversationFacts
from classroom_rl.rollout.post_test import MISSED, Exam
from classroom_rl.rollout.reviews import MessageToReview, Review, reviewed
from classroom_rl.rollout.thoughts import visible_messages, visible_text
from classroom_rl.rollout.tokens import Turn

SUPERVISOR, JUDGE = "supervisor", "judge"


async def review_of_message(
    roles: Roles, fork: Fork, turn: Turn, penalties: Mapping[str, float], max_turns: int
) -> Review:
    """The supervisor's priced review of a message at the fork.

    Args:
        max_turns: the number of messages after which the teacher ends the conversation.
    """
    message = MessageToReview(
        visible_messages(fork.before),
        visible_text(turn.text),
        fork.problem.text,
        fork.problem.answer,
        ConversationFacts(tuple(earlier_turn.persona for earlier_turn in fork.before), max_turns),
        cut=not turn.ended,
    )
    return await reviewed(roles.supervisor, message, penalties)


async def judge_scores(roles: Roles, fork: Fork, turn: Turn, rule: str, attempts: int) -> dict[str, float] | None:
    """The judge's scores of the conversation up to and including a message, as if it ended there: the reward under
    `judge`, and each of `CRITERIA` as a share of its maximum. None without a verdict.

    Two messages at one fork have the same context, so their scores differ because of the messages alone. The judge is
    not told how long the lesson could have been: it would penalise the missing rest.
    """
    conversation_and_problem = (visible_messages([*fork.before, turn]), fork.problem.text)
    requests = (
        ask_for_verdict(roles.judge, rule, attempt, conversation_and_problem, NO_FACTS) for attempt in range(attempts)
    )
    judgement = sum_up(await asyncio.gather(*requests), (rule,))
    if judgement is None or judgement.scores is None:
        return None
    shares = {name: value / CRITERIA[name].top for name, value in asdict(judgement.scores).items()}
    return {JUDGE: judgement.scores.final_reward, **shares}


PRODUCED, LEARNED = "produced", "learned"
OUTCOMES = {
    PRODUCED: "new items that the student produces later, as a share of the lesson's items",
    LEARNED: "those of them that it got wrong at its first try",
}


class LaterOutcome:
    """Measures the outcome of a lesson after one fork; the same object measures both branches.

    Args:
        exam: the post-test on the lesson's problem.
        before: the messages before the forked one.
    """

    def __init__(self, exam: Exam, before: Sequence[Turn]):
        self._exam = exam
        self._before = tuple(before)
        self._settled = {index for index, item in enumerate(exam.ledger(before)) if item.outcome != MISSED}

    def of(self, later: Sequence[Turn]) -> dict[str, float]:
        """Each of `OUTCOMES`, in [0, 1].

        Args:
            later: the messages after the forked one.
        """
        ledger = self._exam.ledger([*self._before, *later])
        new = [item for index, item in enumerate(ledger) if item.known and index not in self._settled]
        items = max(1, len(ledger))
        return {PRODUCED: len(new) / items, LEARNED: sum(item.knew is False for item in new) / items}


def later_messages(record: ConversationRecord, fork: Fork) -> Sequence[Turn]:
    """The messages of a playout after the forked one."""
    return record.turns[fork.place + 1 :]
