"""What becomes of a lesson after a message: the outcome that its price is compared with.

It is read by the ledger of the post-test (docs/post_test.md), from the student's own later words, never by the judge or
the supervisor that set the price. A `LaterOutcome` is made from what came before the fork, before there are branches,
and gets the messages after the forked one: it never sees the forked message itself.
"""

from collections.abc import Sequence

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.evaluation.counterfactuals.forks import Fork
from classroom_rl.rollout.post_test import MISSED, Exam
from classroom_rl.rollout.tokens import Turn

PRODUCED, LEARNED = "produced", "learned"
OUTCOMES = {
    PRODUCED: "new items that the student produces later, as a share of the lesson's items",
    LEARNED: "those of them that it got wrong at its first try",
}


class LaterOutcome:
    """How lessons go on after one fork; the same object measures both branches.

    Args:
        exam: the post-test on the lesson's problem.
        before: the messages before the forked one.
    """

    def __init__(self, exam: Exam, before: Sequence[Turn]):
        self._exam = exam
        self._before = tuple(before)
        self._settled = {place for place, item in enumerate(exam.ledger(before)) if item.outcome != MISSED}

    def of(self, later: Sequence[Turn]) -> dict[str, float]:
        """Each of `OUTCOMES`, in [0, 1].

        Args:
            later: the messages after the forked one.
        """
        ledger = self._exam.ledger([*self._before, *later])
        new = [item for place, item in enumerate(ledger) if item.known and place not in self._settled]
        items = max(1, len(ledger))
        return {PRODUCED: len(new) / items, LEARNED: sum(item.knew is False for item in new) / items}


def later_messages(record: ConversationRecord, fork: Fork) -> Sequence[Turn]:
    """The messages of a playout after the forked one."""
    return record.turns[fork.place + 1 :]
