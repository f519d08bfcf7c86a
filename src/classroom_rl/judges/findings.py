"""The findings of an embedded judge on single messages, and the verdict on a conversation that follows from them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from classroom_rl.judges.known_moves import MOST_BEYOND_RULES
from classroom_rl.judges.tricks import MOST_WITH_TRICK
from classroom_rl.judges.verdicts import BEYOND_RULES, CRITERIA


@dataclass(frozen=True)
class TurnFinding:
    """An embedded judge's findings on one teacher message.

    Attributes:
        index: the index of the message in the conversation, from 0.
        replies_to: the index of the student message that it replies to; None for an opening.
        student_error_kind: the kind of slip in that student message (the first of several); None without a slip.
        scaffolded: whether it hints at the right kind of slip, does not give the answer, and lets the student correct
            the slip.
        void: whether the message counts for nothing: it speaks for the student or to the judge, gives the answer to its
            own question, is far too long, or ends before the lesson is complete.
        falsely_corrected: whether it treats a message without a slip as if it had one.
        sets_task: whether it sets the student a task.
        task_final: whether it sets exactly one task and ends with it.
        moved_on: whether it goes on to new content at once, after a message without a slip.
        progressed: whether it advances the lesson without going back in the plan; after a slip, whether it scaffolds.
        new_step: whether it asks exactly one question, which is in the plan and was not asked before.
        ends: whether it closes the conversation.
        task_reason, forward_reason, momentum_reason: short reasons for the three scores.
        turns_back: whether its question comes before an already asked one in the plan.
        reviews: whether it comes back to an item of before, or asks what one means, as often as a lesson has time for.
        trick: if it replies to a slip, what is false in it, or that it gives the right form in a code (`tricks.py`); ""
            if neither.
        unread: its first sentence that no rule can read (`known_moves.find_unread`); "" if there is none.
    """

    index: int
    replies_to: int | None
    student_error_kind: str | None
    scaffolded: bool
    void: bool
    falsely_corrected: bool
    sets_task: bool
    task_final: bool
    moved_on: bool
    progressed: bool
    new_step: bool
    ends: bool
    task_reason: str
    forward_reason: str
    momentum_reason: str
    turns_back: bool = False
    reviews: bool = False
    trick: str = ""
    unread: str = ""

    @property
    def task_score(self) -> float | None:
        """1 or 0; None for a message that sets no task and needs none."""
        if self.void or self.falsely_corrected or (self.student_error_kind is not None and not self.scaffolded):
            return 0.0
        return float(self.task_final) if self.sets_task else None

    @property
    def forward_score(self) -> float | None:
        """1 or 0; None for an opening, which replies to nothing."""
        if self.replies_to is None:
            return None
        return float(self.moved_on if self.student_error_kind is None else self.scaffolded)

    @property
    def momentum_score(self) -> float | None:
        """1 or 0; None for an opening."""
        return None if self.replies_to is None else float(self.progressed)

    @property
    def score(self) -> float | None:
        """The mean of the message's scores, weighted as in the reward; None if it has no score."""
        scores = zip(CRITERIA.values(), (self.task_score, self.forward_score, self.momentum_score), strict=True)
        weighted_scores = [(criterion.weight, score) for criterion, score in scores if score is not None]
        total_weight = sum(weight for weight, _ in weighted_scores)
        return sum(weight * score for weight, score in weighted_scores) / total_weight if weighted_scores else None


STEPS_FOR_REVIEW = 3
"""The steps of the plan that have to be taken for each message that reviews one."""


@dataclass(frozen=True)
class Coverage:
    """How much of a lesson was covered: `taken` steps out of `due`. `taken` may be fractional: outside the quickstart,
    an early goodbye costs half a step."""

    taken: float
    due: int

    @property
    def share(self) -> float:
        """The covered share of the lesson, from 0 to 1."""
        return min(1.0, self.taken / self.due)

    @property
    def reason(self) -> str:
        """An explanation to append to the judge's reasons; "" if the whole lesson was covered."""
        if self.share == 1:
            return ""
        steps = f"{self.taken:g} of {self.due} steps of the lesson were taken"
        return f"; {steps}: no score above {self.share:.2f} of its range"


FULL_COVERAGE = Coverage(1, 1)


def steps_forward(steps: int, back: int) -> int:
    """The number of steps that count, of `steps` of which `back` go back in the plan: all, unless at least as many go
    back as go forward; then only one counts. (The first step does neither.)"""
    return 1 if back and back >= steps - 1 - back else steps


def verdict(findings: Sequence[TurnFinding], covered: Coverage = FULL_COVERAGE) -> dict[str, float | str]:
    """The three scores and their reasons, under the six keys of a judge's answer, and under `beyond_rules` the number
    of messages that no rule can read. No score exceeds the covered share of the lesson, nor `MOST_BEYOND_RULES` if
    there are such messages, nor `MOST_WITH_TRICK` if a reply to an error is a trick. Scores of single messages have no
    such cap: a model that begins to learn asks its first good questions among much that no rule can read."""
    task = _macro_mean(findings, lambda finding: finding.task_score)
    forward = _macro_mean(findings, lambda finding: finding.forward_score)
    momentum = _macro_mean(findings, lambda finding: finding.momentum_score)
    has_task = any(finding.sets_task for finding in findings)
    task_reasons = _reasons(findings, lambda f: f.task_reason) if has_task else "No task was set."
    unread = [finding for finding in findings if finding.unread]
    tricks = [finding for finding in findings if finding.trick]
    limit = min(covered.share, MOST_BEYOND_RULES if unread else 1, MOST_WITH_TRICK if tricks else 1)
    remarks = covered.reason + "".join(
        f"; turn {finding.index + 1}: {BEYOND_RULES} (“{finding.unread[:60]}”)" for finding in unread
    )
    remarks += "".join(f"; turn {finding.index + 1}: {finding.trick}" for finding in tricks)
    return {
        "task_final_score": round(min(task, limit), 4) if has_task else 0.0,
        "task_final_reasoning": task_reasons + remarks,
        "forward_progression_score": round(min(forward, limit), 4),
        "forward_progression_reasoning": _reasons(findings, lambda f: f.forward_reason) + remarks,
        "overall_momentum_score": round(10 * min(momentum, limit), 4),
        "overall_momentum_reasoning": _reasons(findings, lambda f: f.momentum_reason) + remarks,
        "beyond_rules": len(unread),
    }


def _macro_mean(findings: Iterable[TurnFinding], score: Callable[[TurnFinding], float | None]) -> float:
    """The macro average of two groups of messages: the replies to slips, and all others. So a teacher that handles only
    one of them well gets half of the score, however rare the other is. A group without scores is left out; without any
    scores the result is 0."""
    groups: dict[bool, list[float]] = {True: [], False: []}
    for finding in findings:
        value = score(finding)
        if value is not None:
            groups[finding.student_error_kind is not None].append(value)
    means = [fmean(values) for values in groups.values() if values]
    return fmean(means) if means else 0.0


def _reasons(findings: Iterable[TurnFinding], reason: Callable[[TurnFinding], str]) -> str:
    parts = [f"turn {finding.index + 1}: {reason(finding)}" for finding in findings if reason(finding)]
    return "; ".join(parts) if parts else "The teacher replied to nothing."
