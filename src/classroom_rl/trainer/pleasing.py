"""Whether a student under training learns to please: to be right although an error was drawn, to repair after anything,
or to make lessons go better for the tutor while it is less and less the learner that it plays. Such a student would
teach its tutor nothing in the next phase (launch/in_turns.py).

Each sign is a share of the latest messages or conversations beside that of the first ones that this process has seen.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from classroom_rl.config.values import STUDENT_REWARD
from classroom_rl.environments.classroom.record import PEDAGOGICAL, ConversationRecord
from classroom_rl.environments.classroom.student_reward import StudentMessage, student_messages

LEAST_MESSAGES, LARGEST_MOVE = 128, 0.2
"""The least messages on each side, and the largest move of a share of them. A share that stays at 0.5 moves up by more
in 1 of 1,400 comparisons, one that stays at 0.9 falls by more in 1 of 10 million (binomial)."""
LEAST_CONVERSATIONS, LARGEST_DRIFT = 256, 0.1
"""The least conversations on each side, and how far two rewards may move apart from where they were, each."""


def add_and_join(batches: deque[Sequence[Any]], batch: Sequence[Any], least: int) -> list[Any]:
    """Add a batch, drop the oldest ones that `least` values do not need, and return all others joined."""
    batches.append(batch)
    while sum(map(len, batches)) - len(batches[0]) >= least:
        batches.popleft()
    return [value for batch in batches for value in batch]


class Drift:
    """The mean of the latest values, and that of the first ones. Of each there are at least `least`."""

    def __init__(self, least: int):
        self._least = least
        self._first: list[float] = []
        self._latest: list[float] = []
        self._batches: deque[Sequence[float]] = deque()

    def add(self, batch: Sequence[float]) -> None:
        """Add a batch's values, and drop the oldest that `least` do not need."""
        if len(self._first) < self._least:
            self._first += batch
        else:
            self._latest = add_and_join(self._batches, batch, self._least)

    @property
    def latest(self) -> float | None:
        """The mean of the latest values; of the first ones, as long as there are too few others."""
        values = self._latest if self._is_full else self._first
        return fmean(values) if values else None

    @property
    def move(self) -> float:
        """The mean of the latest values minus that of the first ones; 0 as long as there are too few."""
        return self.latest - fmean(self._first) if self._is_full and self.latest is not None else 0.0

    @property
    def _is_full(self) -> bool:
        return len(self._latest) >= self._least


class PleasingWatch:
    """Looks for the signs of pleasing over the batches of a student's training."""

    def __init__(self) -> None:
        self._errs, self._unhelped = Drift(LEAST_MESSAGES), Drift(LEAST_MESSAGES)
        self._student, self._tutor = Drift(LEAST_CONVERSATIONS), Drift(LEAST_CONVERSATIONS)

    def update(self, records: Sequence[ConversationRecord]) -> dict[str, float]:
        """Add a batch, and return the metrics."""
        messages = [message for record in records for message in student_messages(record.problem, record.turns)]
        self._errs.add([float(message.errors > 0) for message in messages if message.drawn])
        self._unhelped.add([float(_repairs(message)) for message in messages if message.helped is False])
        for name, drift in ((STUDENT_REWARD, self._student), (PEDAGOGICAL, self._tutor)):
            drift.add([value for record in records if (value := record.rewards.get(name)) is not None])
        metrics = {
            "guard/student_errs_when_drawn": self._errs.latest,
            "guard/student_repairs_unhelped": self._unhelped.latest,
            "guard/student_pleases": float(bool(self.signs())),
        }
        return {name: value for name, value in metrics.items() if value is not None}

    def signs(self) -> dict[str, str]:
        """A warning for each sign that is there."""
        fall, rise = -self._errs.move, self._unhelped.move
        lost, won = -self._student.move, self._tutor.move
        signs = {}
        if fall > LARGEST_MOVE:
            signs["errs"] = (
                f"{self._errs.latest:.0%} of the messages for which an error was drawn hold one, {fall:.0%} less"
            )
        if rise > LARGEST_MOVE:
            signs["repairs"] = (
                f"it repairs {self._unhelped.latest:.0%} of its errors that no hint scaffolds, {rise:.0%} more"
            )
        if min(lost, won) > LARGEST_DRIFT:
            signs["rewards"] = f"the tutor's reward is {won:.2f} higher, and the student's own {lost:.2f} lower"
        return {
            name: f"The student learns to please: {text} than when this training process began."
            for name, text in signs.items()
        }


def _repairs(message: StudentMessage) -> bool:
    return message.answers and message.errors == 0
